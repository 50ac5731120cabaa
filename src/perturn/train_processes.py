"""The processes that train together, as `accelerate launch` and `torchrun` start and number them, and their cores."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from perturn.errors import check_fit
from perturn.table import locate

T = TypeVar("T")

DRIVER = "PERTURN_DRIVER"
"""Environment variable of processes that a driver has started to train, and which leave the run folder to it."""


def world_size() -> int:
    """Return how many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leads() -> bool:
    """Return whether this process is the only one, or the first, which alone writes in the run folder."""
    return world_size() == 1 or os.environ.get("RANK") == "0"


def holds_run() -> bool:
    """Return whether this process, and not the driver that started it, takes the run folder's lock and writes to it."""
    return leads() and DRIVER not in os.environ


def share_of(batch_size: int, processes: int) -> int:
    """Return rows of an optimizer step that are this process's.

    Args:
        batch_size: Rows of the step.
        processes: Processes that will train, where this one starts them. Several that train already count themselves.

    Raises:
        ConfigError: If they cannot be divided evenly.
    """
    several = world_size() if world_size() > 1 else processes
    must = f"be a multiple of the {several} processes"
    remedy = "Start as many as divide it, or set another batch_size."
    check_fit(batch_size % several == 0, "batch_size", must, batch_size, remedy)
    return batch_size // several


@contextmanager
def leader_first() -> Iterator[None]:
    """Let the first process run the block before the others enter it."""
    if world_size() == 1:
        yield
        return
    cpu = not locate("torch.cuda:is_available")()
    state = locate("accelerate:PartialState")(cpu=cpu)
    atexit.register(state.destroy_process_group)  # later, its threads may abort the interpreter
    with state.main_process_first():
        yield


def from_leader(value: T) -> T:
    """Return the first process's value, in every process."""
    shared = [value]
    if world_size() > 1:
        locate("accelerate.utils:broadcast_object_list")(shared)
    return shared[0]


def any_of(claim: bool) -> bool:
    """Return whether a claim is true in any process."""
    return claim if world_size() == 1 else any(locate("accelerate.utils:gather_object")([claim]))
