"""A text environment with Gymnasium's interface: walk through a maze to its exit.

    perturn evaluate --model smollm2-135m --environment gymnasium \
        environment.make=examples/gymnasium_environment.py:Maze "environment.seeds={train: 50, test: 20}"

A task is a seed, and `step` returns five values. Observations and actions are texts. Perturn reads `success`, `valid`
and `admissible_commands` from `info`.
"""

import random
from typing import Any


class Maze:
    """You are in a row of rooms and look for the exit. Go east or west."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Start in the middle room. The text says in which direction the exit is."""
        draw = random.Random(seed)
        self.room, self.exit = 0, draw.choice([-1, 1]) * draw.randint(1, 3)
        way = "east" if self.exit > 0 else "west"
        return f"You are in a row of rooms. The exit is {way} of here.", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Go to the next room."""
        if action not in ("east", "west"):
            return "You can go east or west.", 0.0, False, False, {"valid": False, **self._info()}
        self.room += 1 if action == "east" else -1
        out = self.room == self.exit
        lost = abs(self.room) > 5
        text = "You are out." if out else "You are lost." if lost else "Another room."
        return text, float(out), out, lost, self._info()

    def _info(self) -> dict[str, Any]:
        return {"admissible_commands": ["east", "west"]}
