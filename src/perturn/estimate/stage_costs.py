"""Time and memory of a stage, from the lengths of episodes and the speed of the machine."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from perturn.config.sections import Align, Train
from perturn.estimate.episode_lengths import Episodes
from perturn.estimate.memory import cache_bytes

if TYPE_CHECKING:
    from perturn.estimate.machine_speed import Machine

EFFICIENCY = {("cpu", 2): 0.3, ("cpu", 4): 0.7}
"""Speed of a whole pass, forward or backward, as a share of its matrix products' speed, by device and bytes."""
CONVERSATION_SECONDS = {"cpu": 2e-4, "cuda": 5e-5}
"""Time of a layer outside its matrix products, for the next token of one conversation: attention, mostly."""
LOADED_BYTES = 1e9
"""Bytes of weights that are loaded, or saved, in a second."""
PLAYING_SECONDS = 0.5
"""Time of a stage that plays, besides its episodes, worlds and weights: the tokenizer, the engine, the notes."""
TRAINING_SECONDS = 2.0
"""Time of a training besides its steps and weights: encoding rows, making the trainer, checking the packed passes."""
LAUNCH_SECONDS = 10.0
"""Time in which the processes of a training start, which is mostly the time of their imports."""
STEP_SECONDS = 0.03
"""Time of an optimizer step besides its passes."""
REPORT_SECONDS = 2.0
"""Time of the report at the end of a run."""
KEPT_BY_ALLOCATOR = 1.4
"""Memory held over memory needed."""


def judged_tokens(found: Episodes, episodes: int, *, at_turns: bool) -> float:
    """Return tokens that a value head reads: explored episodes, and those to choose among, whole or up to each turn."""
    turns = found.policy_turns(learned=True)
    whole = found.prompt + (turns - 1) * found.heard + turns * found.said
    up_to_each = turns * (found.prompt + (turns - 1) / 2 * found.heard + (turns + 1) / 2 * found.said)
    return found.explore * whole + episodes * (up_to_each if at_turns else whole)


def generation_seconds(
    machine: Machine,
    found: Episodes,
    episodes: int,
    concurrency: int,
    learned: bool,
    most: int,
    candidates: int = 1,
) -> float:
    """Return the time to read the new tokens and write one by one, or the worlds' time if it is longer.

    Args:
        machine: Model and machine.
        found: Lengths of episodes.
        episodes: Number of episodes.
        concurrency: Played at the same time.
        learned: Whether the policy was trained on the expert's episodes; it then writes no more than the expert.
        most: Token limit of an action.
        candidates: Actions that are sampled at each turn, at the same time.
    """
    turns = found.policy_turns(learned)
    said = candidates * (min(found.said, most) if learned else most)
    read = episodes * (found.prompt + turns * (found.heard + said))
    together = candidates * max(1, min(concurrency, episodes))
    step = machine.parameters * machine.bytes / machine.few
    step += machine.layers * together * CONVERSATION_SECONDS.get(machine.device, 2e-4)
    playing = read * 2 * machine.parameters / machine.many + episodes * turns * said / together * step
    return max(playing * machine.crowd, episodes * turns * found.seconds)


def opening_seconds(
    machine: Machine | None, found: Episodes, episodes: int, concurrency: int, cores: int
) -> float:
    """Return the time before a stage's first turn: its weights are loaded and its worlds start.

    Args:
        machine: Model and machine; None: the model is not loaded here.
        found: Seconds in which a world starts.
        episodes: Number of episodes.
        concurrency: Played at the same time, each in a world.
        cores: Worlds that start at the same time.
    """
    weights = machine.parameters * machine.bytes / LOADED_BYTES if machine else 0.0
    worlds = max(1, min(concurrency, episodes)) / max(1, cores)
    return PLAYING_SECONDS + weights + found.world_seconds * max(1.0, worlds)


def trained_tokens(found: Episodes, rows: int, on_pairs: bool, own: bool = False) -> float:
    """Return tokens that one epoch reads, before sharing of prefixes.

    Args:
        found: Lengths of episodes.
        rows: Number of rows.
        on_pairs: Whether a row is an episode of the expert and one of the policy.
        own: Whether a row is an episode of the policy alone.
    """
    policy = found.policy_turns(learned=True)
    sides = [found.turns, policy] if on_pairs else [policy if own else found.turns]
    return rows * sum(found.prompt + (turns - 1) * found.heard + turns * found.said for turns in sides)


def training_seconds(
    machine: Machine, settings: Train, tokens: float, reads_reference: bool, processes: int = 1
) -> float:
    """Forward and backward passes, and the one forward pass of a reference, which every process makes.

    Processes on GPUs have one each and share the passes; on a CPU they share its cores, so nothing is gained.
    """
    if processes > 1 and machine.device == "cuda":
        alone = training_seconds(machine, settings, tokens, False) / processes
        return alone + passing_seconds(machine, 2 * reads_reference * tokens)
    reference = passing_seconds(machine, 2 * reads_reference * tokens)
    if machine.trained is not None:
        again = machine.passed or 0.0 if settings.gradient_checkpointing else 0.0
        return reference + settings.epochs * tokens * (machine.trained + again)
    passes = (4 if settings.lora else 6) + (2 if settings.gradient_checkpointing else 0)
    return reference + passing_seconds(machine, passes * settings.epochs * tokens)


def fitting_seconds(machine: Machine, settings: Train, rows: int, processes: int = 1) -> float:
    """Time of a training besides its passes: weights are loaded and saved, and optimizer steps are taken.

    Several processes are started for each training.
    """
    if processes > 1:
        return fitting_seconds(machine, settings, rows) + machine.crowd * LAUNCH_SECONDS
    minibatches = settings.minibatches if isinstance(settings, Align) else None
    steps = settings.epochs * (minibatches or ceil(rows / settings.batch_size))
    return machine.crowd * (
        TRAINING_SECONDS + 2 * 4 * machine.parameters / LOADED_BYTES + steps * STEP_SECONDS
    )


def passing_seconds(machine: Machine, operations: float) -> float:
    """Return the time of some operations a parameter and token, at whole passes' speed; a forward pass has two."""
    if machine.passed is not None:
        return operations / 2 * machine.passed
    efficiency = EFFICIENCY.get((machine.device, machine.bytes), 0.4)
    return machine.crowd * operations * machine.parameters / (machine.many * efficiency)


def playing_gb(machine: Machine, found: Episodes, together: int, learned: bool, limit: float | None) -> float:
    """Memory of a process that plays: memory without a model, the weights, and keys and values.

    Args:
        machine: Model and machine.
        found: Lengths of episodes.
        together: Conversations at the same time.
        learned: Whether the policy was trained on the expert's episodes.
        limit: Gigabytes of keys and values that the engine keeps at most; None: not known.
    """
    tokens = found.prompt + found.policy_turns(learned) * (found.heard + found.said)
    cache = together * tokens * cache_bytes(machine.shape, machine.bytes) / 1e9
    weights = machine.parameters * machine.bytes / 1e9
    return (machine.base_gb + weights + min(cache, limit or cache)) * KEPT_BY_ALLOCATOR
