"""From counts, lengths and rates to seconds and gigabytes: plain arithmetic, each formula once."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.run.plan.episodes import Panels
from perturn.settings.recipe import Train

TRAINING_EFFICIENCY = {("cpu", 2): 0.3, ("cpu", 4): 0.7}
"""Of the measured matrix products, what a whole training step reaches, by device and bytes of a number."""
ASSUMED_EFFICIENCY = 0.4
"""The same elsewhere, where it was not measured."""
CONVERSATION_SECONDS = {"cpu": 2e-4, "cuda": 5e-5}
"""Time of a layer beside its matrix products, for the next token of one conversation: attention, mostly."""
KEPT_BY_ALLOCATOR = 1.4
"""What the process holds over what it needs."""
LOGITS_GB = 0.25
"""Logits kept for the backward pass at most."""


@dataclass(frozen=True)
class Shape:
    """Size of a model, from its config; weights are not read."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    key_value_width: int
    """Numbers kept for a token in a layer, keys and values together."""
    trained: int
    """Parameters that training changes."""


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second."""

    many: float
    """Floating-point operations a second where a thousand tokens go through a layer together, as in training."""
    few: float
    """Bytes of weights a second where one token of each of 16 conversations goes through a layer."""


@dataclass(frozen=True)
class Machine:
    """The model on this machine."""

    shape: Shape
    rates: Rates
    device: str
    bytes: int
    """Of a number in the type that is computed in."""
    base_gb: float
    """What the process holds before any model."""


def generation_seconds(
    machine: Machine, panels: Panels, episodes: int, concurrency: int, learned: bool, most: int
) -> float:
    """Reading what is new and writing token by token, or the worlds if they take longer.

    Args:
        machine: Model and machine.
        panels: Lengths of episodes.
        episodes: How many.
        concurrency: Played at the same time.
        learned: Whether the policy was taught by the expert: it then writes as much as the expert and needs, as
            we assume, half of the turns between the expert's and the limit; otherwise it uses all there is.
        most: Token limit of an action.
    """
    turns = turns_of(panels, learned)
    said = min(panels.said_tokens, most) if learned else most
    read = panels.prompt_tokens + turns * panels.heard_tokens + turns * said
    reading = episodes * read * 2 * machine.shape.parameters / machine.rates.many
    together = min(concurrency, episodes)
    step = machine.shape.parameters * machine.bytes / machine.rates.few
    step += machine.shape.layers * together * CONVERSATION_SECONDS[machine.device]
    writing = episodes * turns * said / together * step
    return max(reading + writing, episodes * turns * panels.seconds)


def turns_of(panels: Panels, learned: bool) -> float:
    """Turns of a policy's episode, as assumed above."""
    return (panels.turns + panels.limit) / 2 if learned else panels.limit


def generation_gb(machine: Machine, panels: Panels, concurrency: int, cache_gb: float) -> float:
    """Weights, and keys and values of the conversations."""
    weights = machine.shape.parameters * machine.bytes / 1e9
    length = panels.prompt_tokens + panels.limit * (panels.heard_tokens + panels.said_tokens)
    kept = concurrency * length * machine.shape.layers * machine.shape.key_value_width * machine.bytes / 1e9
    return (machine.base_gb + weights + min(kept, cache_gb)) * KEPT_BY_ALLOCATOR


def trained_tokens(panels: Panels, rows: int, on_pairs: bool) -> float:
    """Tokens that one epoch reads, before sharing of prefixes."""
    expert = (
        panels.prompt_tokens + (panels.turns - 1) * panels.heard_tokens + panels.turns * panels.said_tokens
    )
    turns = turns_of(panels, learned=True)
    own = panels.prompt_tokens + (turns - 1) * panels.heard_tokens + turns * panels.said_tokens
    return rows * (expert + own if on_pairs else expert)


def training_seconds(machine: Machine, settings: Train, tokens: float, needs_reference: bool) -> float:
    """Forward and backward passes, and the reference's one forward pass."""
    backward = 4 if settings.lora is None else 2
    passes = (2 + backward + (2 if settings.gradient_checkpointing else 0)) * settings.epochs
    passes += 2 if needs_reference else 0
    efficiency = TRAINING_EFFICIENCY.get((machine.device, machine.bytes), ASSUMED_EFFICIENCY)
    return passes * machine.shape.parameters * tokens / (machine.rates.many * efficiency)


def training_gb(machine: Machine, settings: Train, longest: float) -> float:
    """Weights and their copy in the computed type, gradients, Adam's two moments, activations, logits."""
    shape = machine.shape
    copies = 4 + (machine.bytes if machine.bytes < 4 else 0)
    held = (shape.parameters * copies + shape.trained * 12) / 1e9
    numbers = 8 * shape.hidden + 4 * shape.inner + 2 * shape.key_value_width
    # Of a checkpointed layer its input and its attention's output are kept.
    others = 2 * shape.hidden if settings.gradient_checkpointing else numbers
    numbers += (shape.layers - 1) * others
    activations = max(settings.token_budget, longest) * numbers * machine.bytes / 1e9
    return (machine.base_gb + held + activations + LOGITS_GB) * KEPT_BY_ALLOCATOR
