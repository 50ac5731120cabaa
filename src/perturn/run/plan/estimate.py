"""From lengths and a measured speed to seconds and gigabytes: plain arithmetic, right within a factor of two."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.run.plan.episodes import Panels
from perturn.settings.recipe import Train

TRAINING_EFFICIENCY = {("cpu", 2): 0.3, ("cpu", 4): 0.7}
"""Speed of a whole training step over that of matrix products, by device and bytes of a number; else 0.4."""
CONVERSATION_SECONDS = {"cpu": 2e-4, "cuda": 5e-5}
"""Time of a layer beside its matrix products, for the next token of one conversation: attention, mostly."""
KEPT_BY_ALLOCATOR = 1.4
"""Memory held over memory needed."""
LAYER_WIDTHS = 24
"""Numbers that a layer keeps of a token for the backward pass, over the hidden size; 2 if checkpointed."""


@dataclass(frozen=True)
class Machine:
    """A model on this machine: its size, and the speed of matrix products of that size."""

    parameters: int
    layers: int
    hidden: int
    device: str
    bytes: int
    """Of a number in the type that is computed in."""
    many: float
    """Operations a second where a thousand tokens pass together, as in training."""
    few: float
    """Bytes of weights a second where one token of each of 16 conversations passes."""
    base_gb: float
    """Memory of the process without a model."""


def turns_of(panels: Panels, learned: bool) -> float:
    """Turns of a policy's episode: one taught by the expert needs half of those between the expert's and the limit."""
    return (panels.turns + panels.limit) / 2 if learned else panels.limit


def generation_seconds(
    machine: Machine, panels: Panels, episodes: int, concurrency: int, learned: bool, most: int
) -> float:
    """Reading the new tokens and writing one by one, or the worlds if they take longer.

    Args:
        machine: Model and machine.
        panels: Lengths of episodes.
        episodes: Number of episodes.
        concurrency: Played at the same time.
        learned: Whether the policy was taught by the expert; it then writes no more than the expert.
        most: Token limit of an action.
    """
    turns = turns_of(panels, learned)
    said = min(panels.said, most) if learned else most
    read = episodes * (panels.prompt + turns * (panels.heard + said))
    together = min(concurrency, episodes)
    step = machine.parameters * machine.bytes / machine.few
    step += machine.layers * together * CONVERSATION_SECONDS.get(machine.device, 2e-4)
    playing = read * 2 * machine.parameters / machine.many + episodes * turns * said / together * step
    return max(playing, episodes * turns * panels.seconds)


def generation_gb(machine: Machine, cache_gb: float) -> float:
    """Weights, and a full cache of keys and values."""
    return (machine.base_gb + machine.parameters * machine.bytes / 1e9 + cache_gb) * KEPT_BY_ALLOCATOR


def trained_tokens(panels: Panels, rows: int, on_pairs: bool) -> float:
    """Tokens that one epoch reads, before sharing of prefixes."""
    sides = [panels.turns, turns_of(panels, learned=True)] if on_pairs else [panels.turns]
    return rows * sum(panels.prompt + (turns - 1) * panels.heard + turns * panels.said for turns in sides)


def training_seconds(machine: Machine, settings: Train, tokens: float, on_pairs: bool) -> float:
    """Forward and backward passes, and for pairs the reference's one forward pass."""
    passes = (4 if settings.lora else 6) + (2 if settings.gradient_checkpointing else 0)
    efficiency = TRAINING_EFFICIENCY.get((machine.device, machine.bytes), 0.4)
    operations = (passes * settings.epochs + 2 * on_pairs) * machine.parameters * tokens
    return operations / (machine.many * efficiency)


def training_gb(machine: Machine, settings: Train) -> float:
    """Weights, gradients and Adam's two moments in float32, and activations of one token budget."""
    held = machine.parameters * (4 if settings.lora else 16)
    widths = LAYER_WIDTHS + (machine.layers - 1) * (2 if settings.gradient_checkpointing else LAYER_WIDTHS)
    activations = settings.token_budget * widths * machine.hidden * machine.bytes
    return (machine.base_gb + (held + activations) / 1e9) * KEPT_BY_ALLOCATOR
