"""Environment of your own that implements the whole contract: guess a number by hearing 'higher' or 'lower'.

perturn check-env examples/own_environment.py:GuessNumber
"""

from collections.abc import Sequence

from perturn.types import Observation, Task

RANGES = {"train": range(1, 9), "test": range(9, 13)}


class GuessNumber:
    """You guess a whole number from 1 to 12 by hearing whether it is higher or lower. An action is a number."""

    name = "guess-number-1.0"

    def tasks(self, split: str) -> Sequence[Task]:
        """Return one task for each secret number of the split."""
        return [Task(id=f"guess/{n}", kind="guess", split=split, data={"secret": n}) for n in RANGES[split]]

    def reset(self, task: Task, seed: int) -> Observation:
        """Choose the secret number, and describe the task. The seed is not needed, since nothing else is random."""
        self.secret = task.data["secret"]
        self.low, self.high = 1, 12
        return self._open("I think of a whole number from 1 to 12. Guess it.")

    def step(self, action: str) -> Observation:
        """Compare a guess with the secret number."""
        if not action.strip().isdecimal():
            return self._open("Write a whole number, such as 7.", valid=False)
        if (guess := int(action)) == self.secret:
            return Observation("Right!", reward=1.0, terminated=True, success=True)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return self._open("higher")
        self.high = min(self.high, guess - 1)
        return self._open("lower")

    def expert(self, task: Task) -> Sequence[str]:
        """Return actions that solve the task. This optional method makes the class an `Expert` too."""
        return [str(task.data["secret"])]

    def close(self) -> None:
        """Do nothing. This method is optional."""

    def _open(self, text: str, valid: bool = True) -> Observation:
        """Return an observation of a game that goes on. Its state is the range of numbers that are left."""
        return Observation(text, valid=valid, state_key=f"{self.low} to {self.high}")
