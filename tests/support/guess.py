"""A plain game of a user's."""

from perturn.envs.user_environment import at_border


class Guess:
    """Guess a number.

    It is whole.

    Args:
        none: There is none.
    """

    def tasks(self, split):
        """Two for training."""
        return [7, 8] if split == "train" else []

    def reset(self, task):
        """Pose it."""
        self.secret = task
        return "Guess."

    def step(self, action):
        """Compare."""
        return ("Right!", 1.0, True) if action == str(self.secret) else "Wrong."


def game(**methods):
    """The game with some attributes replaced, at the border."""
    return at_border(type("Game", (Guess,), methods)(), "Game")
