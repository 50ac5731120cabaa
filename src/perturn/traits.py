"""Traits of environments and engines, and the signature of an environment's ability.

Standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perturn.errors import check_free, check_type

Form = Literal["task", "actions", "turns", "plain"]
"""How a value is sent to another process or node: a `Task`; a list of texts; a list of (thought, action); or numbers,
texts, None, and lists and dicts of them."""
_OWN = {"name", "tasks", "reset", "step", "close", "declared", "played", "traits"}
"""Names that an ability cannot have."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Ability:
    """The signature of an optional method of an environment, by which its calls are sent to another process or node."""

    takes: tuple[Form, ...]
    """Forms of the arguments, in order."""
    gives: Form
    """Form of the result."""
    or_none: bool = False
    """Whether the result may also be None."""
    crosses: bool = True
    """Whether the method can be called in a world in another process or on another node."""


@dataclass(frozen=True)
class EnvironmentTraits:
    """Traits of an environment, in its class attribute `traits`."""

    in_process: bool = False
    """Whether running a world in a process has only costs. Its simulator then runs in its own process anyway, or it is
    Python code of this package, which waits for nothing and whose worlds share their data."""
    protocol: str | None = None
    """Named protocol of published scores on the environment."""
    distributions: tuple[str, ...] = ()
    """Installed packages that its results depend on; the run's manifest keeps their versions."""
    reads: Paths | Callable[[Mapping[str, Any]], Paths] | None = None
    """Files and folders that it reads besides those named in its settings, or a function from the settings to them. A
    run keeps their digests, and rejects them when they change. None: the files that its code names."""
    answer_action: str | None = None
    """The action that gives an answer, such as `finish[{answer}]`. Each task then has its gold answer as a text in
    `data["answer"]`, and credits may ask how likely the policy finds it."""
    adapts: bool = False
    """Whether `played` holds a user's object with another interface, whose class may declare rules."""
    plays_itself: bool = False
    """Whether its episodes are programs that it plays by itself, with `play(job, protocol, policy)`, a generator like
    `perturn.episodes.episode.episode`. Its episodes cannot be resumed, and its worlds live in the loop's process."""
    abilities: Mapping[str, Ability] = field(default_factory=dict)
    """Optional methods of this class, by name, besides the methods of the table `ABILITIES`."""

    def __post_init__(self) -> None:
        for name in sorted(self.abilities):
            remedy = "Rename it, since every environment has a method of that name."
            check_free(name, _OWN, "an environment has an ability", remedy)


@dataclass(frozen=True)
class EngineTraits:
    """Traits of an engine, in the attribute `traits` of its settings; a property if they depend on the settings."""

    serves_checkpoints: bool
    """Whether it can serve policies that we trained."""
    distributions: tuple[str, ...] = ()
    """Installed packages that its answers depend on; the run's manifest keeps their versions."""
    cache_gigabytes: float | None = None
    """Its memory for keys and values, for `--dry-run`; None: not known."""
    gpu_share: float | None = None
    """Share of a GPU that it holds while a policy is trained, for `--dry-run`; None: its model and the cache."""
    adapter_rank: int = 0
    """Largest rank of adapters that it serves as adapters, next to the base model; adapters of a higher rank are merged
    for it."""
    spending: str = "unknown"
    """Most that it may spend, in words, for `--dry-run`."""
    computes_here: bool = False
    """Whether it computes in this Python process, so that other work of the process waits for it."""
    swaps_weights: bool = False
    """Whether it is a `SwappingEngine`: it goes over to other weights in the middle of answers."""
    takes_models: bool = False
    """Whether it is a `ModelTakingEngine`: it is given the weights of a trained model from memory."""
    prices: tuple[float, float] | None = None
    """Price of a million tokens of prompts, and of answers; None: unknown."""
    reads: str = "files"
    """Form of the trained policies that it reads, as named by `BackendTraits.stores` of the backend."""


def traits_of(environment: Any) -> EnvironmentTraits:
    """Return the traits of an environment or its class; a class without the attribute has the defaults.

    Raises:
        ConfigError: If the attribute is something else.
    """
    found = getattr(environment, "traits", EnvironmentTraits())
    expected = "a perturn.traits.EnvironmentTraits, or have another name if they are of the game"
    check_type("traits of an environment", found, EnvironmentTraits, expected)
    return found
