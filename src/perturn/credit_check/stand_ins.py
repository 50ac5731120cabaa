"""Stand-in values of quantities for tests and timings, computed from the states of episodes without a policy."""

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
    """Return two outcomes that end the episode: a success with probability `chance`, and a failure otherwise."""
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
"""Every episode ends after one turn, so a value depends on the state alone."""


def stand_ins(need: str | Need, episodes: Sequence[Trajectory]) -> Sequence[Any]:
    """Return stand-in values of a quantity, one entry per episode, in the form that a credit gets.

    The values depend on the states of the episodes alone, and not on the rewards. They serve tests and timings.

    Args:
        need: The quantity; it must have an exact value.
        episodes: Trajectories of any length.
    """
    quantity, request = find(need)
    every = copy(Episodes(_PROCESS))
    every.process = replace(_PROCESS, horizon=10**9)
    every.steps = [[_step(turn) for turn in one.turns] for one in episodes]
    every.probability = torch.full((len(episodes),), 1 / max(1, len(episodes)), dtype=torch.float64)
    every.ends = [Outcome(success=bool(steps) and steps[-1].state % 2 == 0) for steps in every.steps]
    return quantity.exact(request, Ground(every, 1.0, every))


def _step(turn: Turn) -> Step:
    """Map a turn to a step of the stand-in process, by a hash of its state key."""
    number = crc32(repr(turn.state_key).encode())
    return Step(number // 2 % len(_PROCESS.actions), number % 2, 0.0)
