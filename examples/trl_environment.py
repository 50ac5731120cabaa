"""Class for TRL's `environment_factory`: open a safe with the code on a note.

    perturn evaluate --model Qwen/Qwen2.5-0.5B-Instruct --environment trl \
        environment.make=examples/trl_environment.py:Safe "environment.rows={test: examples/trl_rows.jsonl}"

In TRL, train with the same class: GRPOTrainer(environment_factory=Safe, train_dataset=rows, ...). A row has the column
`prompt`, and its other columns are arguments of `reset`. Public methods are the tools, and `get_reward` scores the
episode.
"""


class Safe:
    """Two tools, and a reward of its own: half for reading the note, all for opening the safe."""

    def reset(self, code: int, **row: object) -> str:
        """Lock the safe. The returned text is appended to the prompt."""
        self.code = code
        self.read, self.open = False, False
        return "The code is on a note."

    def read_note(self) -> str:
        """Read the note that lies on the safe."""
        self.read = True
        return f"The code is {self.code}."

    def enter_code(self, code: int) -> str:
        """Enter a code at the safe.

        Args:
            code: The number to enter.
        """
        self.open = code == self.code
        return "The safe is open." if self.open else "Wrong code."

    def get_reward(self) -> float:
        """Return the reward of the episode so far."""
        return 1.0 if self.open else 0.5 * self.read
