"""The section `cluster:` of a recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from perturn.bounds import SECONDS, Bound, check_bounds


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that worlds and engine run on; none of it changes what an episode is."""

    distributions: ClassVar[tuple[str, ...]] = ("ray",)
    shorthand: ClassVar[str] = "address"
    """The setting that a text in the place of the section stands for."""

    address: str
    """`ray://host:10001`; `auto` or `host:port` on a machine of the cluster; `local` for one of this machine alone."""
    engines: Annotated[int, Bound(least=0)] = 1
    """Replicas of the policy; 0 keeps the engine in this process, where one that serves an API always is."""
    engine_cpus: Annotated[float, Bound(least=0)] = 1.0
    """CPUs, and threads, of a replica."""
    engine_gpus: Annotated[float, Bound(least=0)] = 0.0
    """GPUs of a replica: a share of one, or a whole number of them."""
    world_cpus: Annotated[float, Bound(least=0)] = 1.0
    """CPUs that the worlds of a node count for together; nodes that have fewer hold none."""
    wait_seconds: Annotated[float, Bound(least=0, most=SECONDS.most)] = 60.0
    """How long to wait for nodes with room."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|local|(ray://)?[^\s/:]+:\d+", self.address):
            raise ValueError(
                f"address must be ray://host:port, host:port, auto or local, got {self.address!r}."
            )
        check_bounds(self)
        if self.engine_gpus > 1 and self.engine_gpus % 1:  # Ray divides one GPU, but not several
            raise ValueError(f"engine_gpus must be <= 1 or a whole number, got {self.engine_gpus}.")
