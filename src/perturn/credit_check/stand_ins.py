"""Entries of quantities for episodes without a policy: exact ones, on a process with the states of the episodes."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch

from perturn.credit_check.processes import Episodes, Outcome, Process, Step
from perturn.needs import Need
from perturn.quantities import Ground, find
from perturn.types import Trajectory, Turn


def _ends(reward: float, chance: float) -> tuple[Outcome, ...]:
    """Return a success with some chance, and a failure with the rest; the episode is over in both."""
    return (Outcome(chance, reward, success=True), Outcome(1 - chance))


_PROCESS = Process(
    "states",
    {
        0: {"go": _ends(1.0, 0.25), "stop": (Outcome(reward=-0.5),)},
        1: {"go": _ends(0.5, 0.5), "stop": _ends(0.25, 0.1)},
        2: {"go": _ends(1.0, 0.75), "stop": (Outcome(reward=0.25),)},
        3: {"go": _ends(0.25, 0.9), "stop": _ends(1.0, 0.2)},
        4: {"go": (Outcome(reward=0.125),), "stop": _ends(0.5, 0.6)},
    },
    {0: (0.2, -0.1), 1: (0.3, 0.0), 2: (0.0, 0.4), 3: (-0.5, 0.1), 4: (0.7, 0.2)},
    horizon=1,
)
"""Every state ends at once, so that its values depend on nothing but the state."""


def stand_ins(need: str | Need, episodes: Sequence[Trajectory]) -> Sequence[Any]:
    """Return an entry of a quantity for each episode, as a credit is given it.

    They follow from the states of the episode alone, and do not depend on its rewards: numbers for tests and timings.

    Args:
        need: The quantity, which has an exact value.
        episodes: Of any length.
    """
    quantity, request = find(need)
    every = copy(Episodes(_PROCESS))
    every.process = replace(_PROCESS, horizon=10**9)
    every.steps = [[_step(turn) for turn in one.turns] for one in episodes]
    every.probability = torch.full((len(episodes),), 1 / max(1, len(episodes)), dtype=torch.float64)
    every.ends = [Outcome(success=bool(steps) and steps[-1].state % 2 == 0) for steps in every.steps]
    return quantity.exact(request, Ground(every, 1.0, every))


def _step(turn: Turn) -> Step:
    """Return the step of a turn: by its state key alone."""
    number = crc32(repr(turn.state_key).encode())
    return Step(number // 2 % len(_PROCESS.actions), number % 2, 0.0)
