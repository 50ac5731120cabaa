"""The section `cluster:` of a recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that worlds and engine run on; none of it changes what an episode is."""

    shorthand: ClassVar[str] = "address"
    """The setting that a text in the place of the section stands for."""

    address: str
    """`ray://host:10001`; `auto` or `host:port` on a machine of the cluster; `local` for one of this machine alone."""
    engines: int = 1
    """Replicas of the policy; 0 keeps the engine in this process, where one that serves an API always is."""
    engine_cpus: float = 1.0
    """CPUs, and threads, of a replica."""
    engine_gpus: float = 0.0
    """GPUs of a replica."""
    world_cpus: float = 1.0
    """CPUs that the worlds of a node count for together; nodes that have fewer hold none."""
    wait_seconds: float = 60.0
    """How long to wait for nodes with room."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|local|(ray://)?[^\s/:]+:\d+", self.address):
            raise ValueError(
                f"address must be ray://host:port, host:port, auto or local, got {self.address!r}."
            )
        for name in ("engines", "engine_cpus", "engine_gpus", "world_cpus", "wait_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}.")
