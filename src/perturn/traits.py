"""Traits of environments and engines, and the signatures of optional methods of environments.

The module imports the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perturn.errors import check_free, check_type

Form = Literal["task", "actions", "turns", "plain"]
"""Form in which a value is sent to another process or node. task: a `Task`. actions: a list of texts. turns: a list of
(thought, action) pairs. plain: numbers, texts, None, and lists and dicts of these."""
_OWN = {"name", "tasks", "reset", "step", "close", "declared", "played", "traits"}
"""Names of the members that every environment has. An optional method cannot have such a name."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Ability:
    """Signature of an optional method of an environment, used to send its calls to another process or node."""

    takes: tuple[Form, ...]
    """Forms of the arguments, in order."""
    gives: Form
    """Form of the result."""
    or_none: bool = False
    """Whether the result may also be None."""
    crosses: bool = True
    """Whether the method can be called on an environment in another process or on another node."""


@dataclass(frozen=True)
class EnvironmentTraits:
    """Traits of an environment, set in its class attribute `traits`."""

    in_process: bool = False
    """Whether the environment runs best inside the loop's process. This holds if its simulator has its own process, or
    if it is Python code of this package that never waits and shares data between its objects."""
    protocol: str | None = None
    """Name of the protocol under which scores on the environment were published."""
    distributions: tuple[str, ...] = ()
    """Installed packages on which results depend; the manifest of a run records their versions."""
    reads: Paths | Callable[[Mapping[str, Any]], Paths] | None = None
    """Files and folders that the environment reads besides paths in its settings, or a function from the settings to
    such paths. A run records their digests, and stops with an error if a file changes. None: the files named in the
    environment's code."""
    answer_action: str | None = None
    """Action that gives an answer, such as `finish[{answer}]`. Each task then has its gold answer as a text in
    `data["answer"]`, and a credit may request the likelihood of this answer."""
    adapts: bool = False
    """Whether the environment wraps a user's object with another interface, in the attribute `played`. The class of
    this object may declare rules."""
    plays_itself: bool = False
    """Whether the environment plays its episodes itself, with a generator `play(job, protocol, policy)` like
    `perturn.episodes.episode.episode`. It must also begin an episode at a turn, as
    `perturn.envs.agent` does. Such episodes run inside the loop's process."""
    abilities: Mapping[str, Ability] = field(default_factory=dict)
    """Name -> signature of the optional methods of this class, besides the methods in the table `ABILITIES`."""

    def __post_init__(self) -> None:
        for name in sorted(self.abilities):
            remedy = "Rename it, since every environment has a method of that name."
            check_free(name, _OWN, "an environment has an ability", remedy)


@dataclass(frozen=True)
class EngineTraits:
    """Traits of an engine, set in the attribute or property `traits` of its settings class."""

    serves_checkpoints: bool
    """Whether the engine can serve policies trained in a run."""
    distributions: tuple[str, ...] = ()
    """Installed packages on which answers depend; the manifest of a run records their versions."""
    cache_gigabytes: float | None = None
    """Size of the KV cache in gigabytes, for `--dry-run`; None: not known."""
    gpu_share: float | None = None
    """Share of GPU memory that the engine keeps during training, in [0, 1], for `--dry-run`; None: it is
    computed from the sizes of its model and its cache."""
    adapter_rank: int = 0
    """Largest LoRA rank that the engine serves as an adapter next to the base model. Adapters of a higher rank are
    merged into the model."""
    spending: str = "unknown"
    """Upper limit of the engine's spending, in words, for `--dry-run`; it names settings as `engine.KEY`."""
    computes_here: bool = False
    """Whether the engine computes in this Python process, which blocks other work of the process."""
    swaps_weights: bool = False
    """Whether the engine is a `SwappingEngine`, which can change its weights in the middle of an answer."""
    takes_models: bool = False
    """Whether the engine is a `ModelTakingEngine`, which gets the weights of a trained model from memory."""
    prices: tuple[float, float] | None = None
    """Price of a million prompt tokens, and of a million answer tokens; None: unknown."""
    copies: int = 1
    """Number of copies of the model that answer at the same time, each with its own devices, for `--dry-run`."""
    reads: str = "files"
    """Form of the trained policies that the engine reads, as named in `BackendTraits.stores` of the backend."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the settings add to each request or replace in it, such as the temperature. They are recorded
    with scores."""


def traits_of(environment: Any) -> EnvironmentTraits:
    """Return the traits of an environment or its class, or the default traits if it has no attribute `traits`.

    Raises:
        ConfigError: If the attribute `traits` is not an `EnvironmentTraits`.
    """
    found = getattr(environment, "traits", EnvironmentTraits())
    if isinstance(found, property):  # of a class; only its instances have a value
        return EnvironmentTraits()
    expected = "a perturn.traits.EnvironmentTraits, or have another name if they are of the game"
    check_type("traits of an environment", found, EnvironmentTraits, expected)
    return found
