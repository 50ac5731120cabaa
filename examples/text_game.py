"""Text game in three methods: guess a number by hearing 'higher' or 'lower'.

    perturn check-env examples/text_game.py:Guess
    perturn evaluate --model smollm2-135m --environment examples/text_game.py:Guess
    perturn play examples/text_game.py:Guess

`tasks` returns values, and `reset` receives one of them. `step` returns an observation as text, or (text, reward, done)
to end the game. The docstring of the class is the system text, and `max_turns` is the turn limit. `own_environment.py`
has the same game with the whole contract.
"""


class Guess:
    """Guess a whole number from 1 to 12. An action is a number alone, such as 7."""

    max_turns = 6

    def tasks(self, split):
        return range(1, 9) if split == "train" else range(9, 13)

    def reset(self, task):
        self.secret = task
        return "I think of a whole number from 1 to 12. Guess it."

    def step(self, action):
        if not action.isdecimal():
            return "Write a whole number, such as 7."
        if int(action) == self.secret:
            return "Right!", 1.0, True
        return "higher" if int(action) < self.secret else "lower"
