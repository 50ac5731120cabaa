"""The `--dry-run` of every command: its stages, with their time and memory estimated within a factor of two."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from perturn.audit.rows import read_rows
from perturn.data.paths import RunPaths
from perturn.data.run_folder import memory_in_use, resolve_recipe, run_folder
from perturn.data.seals import read_manifest, refuse_damage, without_removed
from perturn.data.store import read_trajectories
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Job, episode
from perturn.errors import EngineFailure
from perturn.faults import closing_world
from perturn.io.reading import user_path
from perturn.policy.tokens import NO_TURN, Renderer
from perturn.run.collect import demonstrate, play_script
from perturn.run.loop import check, refuse_early
from perturn.run.panels import Panels
from perturn.run.session import (
    engine_settings,
    evaluation_sampling,
    make_protocol,
    make_renderer,
    world_maker,
)
from perturn.settings.recipe import Recipe
from perturn.settings.sections import Train
from perturn.settings.stages import Stage, stages
from perturn.table import locate
from perturn.types import Action, EpisodeProtocol, Task, Trajectory, failed

if TYPE_CHECKING:
    from perturn.run.machine import Machine

KEPT = 0.75
"""Share of explored episodes assumed to become pairs, before there are any."""
TRAINING_EFFICIENCY = {("cpu", 2): 0.3, ("cpu", 4): 0.7}
"""Speed of a whole training step over that of matrix products, by device and bytes of a number; else 0.4."""
CONVERSATION_SECONDS = {"cpu": 2e-4, "cuda": 5e-5}
"""Time of a layer beside its matrix products, for the next token of one conversation: attention, mostly."""
KEPT_BY_ALLOCATOR = 1.4
"""Memory held over memory needed."""
LAYER_WIDTHS = 24
"""Numbers that a layer keeps of a token for the backward pass, over the hidden size; 2 if checkpointed."""
_PLAYED = 4
"""Episodes played to see how long they are."""
_PATIENCE_SECONDS = 20.0
"""After so long no further one is begun."""


@dataclass(frozen=True)
class Planned:
    """One step of the plan."""

    name: str
    state: str
    """done, or to do."""
    work: str
    seconds: float | None
    """Estimated, or as measured where it is done; None: not estimated."""
    memory_gb: float | None


@dataclass(frozen=True)
class Plan:
    """The steps of a command."""

    run: str
    steps: list[Planned]
    how: list[str]
    """How the estimates were made, a sentence each."""
    problems: list[str]
    """Failures of the episodes played to see how long they are, a sentence each."""

    @property
    def seconds(self) -> float:
        """Of all that is left to do and was estimated."""
        return sum(step.seconds or 0.0 for step in self.steps if step.state != "done")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return asdict(self) | {"seconds": self.seconds}


@dataclass(frozen=True)
class Episodes:
    """Number of episodes of each stage, and the length of one; tokens are assumed where no expert is to be seen."""

    sft: int = 0
    expert: int = 0
    explore: int = 0
    evaluate: int = 0
    limit: float = 1.0
    """Mean turn limit of the tasks."""
    turns: float = 1.0
    """Turns of an expert's episode; of a policy's, where there is no expert."""
    prompt: float = 200.0
    """Tokens before the first action."""
    heard: float = 60.0
    """Tokens of a later observation, with the template around it."""
    said: float = 128.0
    """Tokens of an action."""
    seconds: float = 0.0
    """Seconds of a turn in its world."""
    memory_gb: float = 0.0
    """Memory of this process and one world."""
    source: str = "assumed, as no expert is to be seen"
    """Origin of the lengths."""
    problems: tuple[str, ...] = ()
    """Failures of the episodes played now, a sentence each."""

    def policy_turns(self, learned: bool) -> float:
        """Turns of a policy's episode: of those between the expert's and the limit, one taught needs half."""
        return (self.turns + self.limit) / 2 if learned else self.limit


def make_plan(source: Path | Recipe, overrides: Sequence[str], command: str | None) -> Plan:
    """Check a recipe as a run would, and estimate what it costs; nothing is written.

    Args:
        source: The recipe, its file, or a run folder.
        overrides: `key=value` words.
        command: The one command that would be given; None: the whole loop.

    Raises:
        PerturnError: Whatever the command itself would refuse before it starts.
    """
    recipe = resolve_recipe(source, overrides)
    refuse_early(recipe, command)
    folder = run_folder(recipe)
    manifest = read_manifest(folder) or {}
    refuse_damage(folder, without_removed(folder, manifest.get("files", {}))[0])
    panels = check(recipe, command)
    engine, machine = engine_settings(recipe), None
    renderer = make_renderer(recipe, recipe.model.name) if engine.serves_checkpoints else None
    found = look_at_episodes(recipe, panels, renderer)
    if engine.serves_checkpoints:
        machine = locate("perturn.run.machine:measure_machine")(recipe.model, found.memory_gb)
        how = _how(machine, found)
    else:
        bound = getattr(engine, "bound", "unknown")
        how = [f"Time is the server's and is not estimated. What it may spend: {bound}."]
    done = manifest.get("stages", {})
    steps = []
    for stage in stages(recipe):
        if command in (None, stage.command):
            work, seconds, memory = _cost(recipe, stage, found, machine)
            before = done.get(stage.name, {})
            if before.get("done"):
                seconds, memory = before.get("seconds"), before.get("peak_memory_gb")
            steps.append(
                Planned(stage.name, "done" if before.get("done") else "to do", work, seconds, memory)
            )
    return Plan(str(folder), steps, how, list(found.problems))


def look_at_episodes(recipe: Recipe, panels: Panels | None, renderer: Renderer | None) -> Episodes:
    """Count the episodes and see how long they are, from those recorded or a few that the expert plays now."""
    if panels is None:
        return Episodes(memory_gb=memory_in_use() / 1e9)
    protocol = make_protocol(recipe.protocol)
    file = RunPaths(run_folder(recipe)).trajectories("expert")
    shown = list(read_trajectories(file)) if file.is_file() else []
    source, seconds, played = "recorded expert episodes", 0.0, []
    with closing_world(world_maker(recipe)()) as env:
        if not shown and panels.expert and hasattr(env, "expert"):
            shown, seconds = _play(env, panels.expert, protocol)
            source, played = "expert episodes played now", shown
        elif not shown:
            played = [
                _try_out(env, next(task for tasks in panels.tasks.values() for task in tasks), protocol)
            ]
        memory = memory_in_use() / 1e9
    limit = fmean(protocol.limit(task) for tasks in panels.tasks.values() for task in tasks)
    lengths: dict[str, Any] = {"turns": limit}
    if renderer and (shown := [one for one in shown if one.turns]):
        lengths = {"source": f"{len(shown)} {source}"} | _lengths(shown[:32], renderer)
    counts: dict[str, Any] = {name: len(tasks) for name, tasks in panels.tasks.items()}
    if recipe.explore:
        counts["explore"] = (recipe.explore.per_iteration or counts["explore"]) * recipe.explore.samples
    return Episodes(
        **counts,
        expert=len(panels.expert),
        limit=limit,
        seconds=seconds,
        memory_gb=memory,
        problems=_problems(played),
        **lengths,
    )


def _play(env: Any, tasks: Sequence[Task], protocol: EpisodeProtocol) -> tuple[list[Trajectory], float]:
    """A few expert episodes of tasks spread over the panel, failed ones too, and the seconds of a turn."""
    chosen = tasks[:: max(1, len(tasks) // _PLAYED)][:_PLAYED]
    played = [demonstrate(env, Job(chosen[0], seed=0), protocol)]
    began = time.monotonic()  # the first one starts the world
    for task in chosen[1:]:
        if time.monotonic() - began < _PATIENCE_SECONDS:
            played.append(demonstrate(env, Job(task, seed=0), protocol))
    turns = sum(len(one.turns) for one in played[1:])
    return played, (time.monotonic() - began) / max(turns, 1)


def _try_out(env: Any, task: Task, protocol: EpisodeProtocol) -> Trajectory:
    """An episode of one action."""
    once = replace(protocol, max_turns=1, max_turns_by_kind={})
    look = Action(FORMATS[protocol.format].write("", "look"))
    return play_script(episode(env, Job(task, seed=0), protocol=once), [look], EngineFailure("unfinished"))


def _problems(played: Iterable[Trajectory]) -> tuple[str, ...]:
    """The errors of the episodes that failed, the most frequent first."""
    errors = Counter(one.error if failed(one) else None for one in played)
    return tuple(
        f"{count} of {errors.total()} episodes played now failed: {error}"
        for error, count in errors.most_common()
        if error is not None
    )


def _lengths(shown: Sequence[Trajectory], renderer: Renderer) -> dict[str, float]:
    """Mean lengths of some episodes, as `Episodes` has them."""
    encoded = [renderer.encode(one, None) for one in shown]
    first = [next(i for i, turn in enumerate(each.turn) if turn != NO_TURN) for each in encoded]
    said = sum(turn != NO_TURN for each in encoded for turn in each.turn)
    turns = sum(each.turns for each in encoded)
    heard = (sum(len(each.ids) for each in encoded) - said - sum(first)) / max(turns - len(encoded), 1)
    return {"turns": turns / len(encoded), "prompt": fmean(first), "heard": heard, "said": said / turns}


def _cost(
    recipe: Recipe, stage: Stage, found: Episodes, machine: Machine | None
) -> tuple[str, float | None, float | None]:
    """Work, seconds and gigabytes; without a machine of ours only the work of a policy is known."""
    if stage.name == "expert":
        file = recipe.expert and recipe.expert.file
        work = f"episodes of {file}" if file else f"{found.expert} episodes"
        return work, found.expert * found.turns * found.seconds, found.memory_gb
    if stage.command == "credit":
        return f"groups of {found.explore} explored episodes", 1.0, found.memory_gb
    if stage.command == "pair":
        own = recipe.pair and recipe.pair.file
        return f"pairs of {own}" if own else f"{found.explore} explored episodes", 1.0, found.memory_gb
    if stage.command == "train":
        assert machine is not None
        return _training_cost(recipe, stage, found, machine)
    explores, learned = stage.command == "collect", stage.name != "evaluate-base"
    part, episodes = (recipe.explore, found.explore) if explores else (recipe.evaluate, found.evaluate)
    assert part is not None
    work = (
        f"{episodes} episodes of split {part.tasks.split}, about {found.policy_turns(learned):.0f} turns each"
    )
    if machine is None:
        return work, None, None
    most = (part.sampling if explores and part.sampling else evaluation_sampling(recipe)).max_new_tokens
    cache = getattr(engine_settings(recipe), "cache_gigabytes", None) or 2.0
    memory = (machine.base_gb + machine.parameters * machine.bytes / 1e9 + cache) * KEPT_BY_ALLOCATOR
    return work, generation_seconds(machine, found, episodes, part.concurrency, learned, most), memory


def _training_cost(
    recipe: Recipe, stage: Stage, found: Episodes, machine: Machine
) -> tuple[str, float, float]:
    settings = recipe.sft if stage.name == "sft" else recipe.align
    assert settings is not None
    on_pairs = stage.name != "sft" and recipe.groups is None
    rows, what = (found.sft if stage.name == "sft" else found.explore), "episodes"
    if on_pairs:
        own = recipe.pair and recipe.pair.file
        file = user_path(own, "pair.file") if own else RunPaths(run_folder(recipe)).pairs(stage.mark)
        rows = sum(1 for _ in read_rows(file)) if file.is_file() else round(KEPT * found.explore)
        what = "pairs" if file.is_file() else "pairs (assumed)"
    tokens = trained_tokens(found, rows, on_pairs)
    work = f"{rows} {what}, {settings.epochs:g} epochs, about {tokens * settings.epochs / 1000:.0f}k tokens"
    return work, training_seconds(machine, settings, tokens, on_pairs), training_gb(machine, settings)


def generation_seconds(
    machine: Machine, found: Episodes, episodes: int, concurrency: int, learned: bool, most: int
) -> float:
    """Reading the new tokens and writing one by one, or the worlds if they take longer.

    Args:
        machine: Model and machine.
        found: Lengths of episodes.
        episodes: Number of episodes.
        concurrency: Played at the same time.
        learned: Whether the policy was taught by the expert; it then writes no more than the expert.
        most: Token limit of an action.
    """
    turns = found.policy_turns(learned)
    said = min(found.said, most) if learned else most
    read = episodes * (found.prompt + turns * (found.heard + said))
    together = min(concurrency, episodes)
    step = machine.parameters * machine.bytes / machine.few
    step += machine.layers * together * CONVERSATION_SECONDS.get(machine.device, 2e-4)
    playing = read * 2 * machine.parameters / machine.many + episodes * turns * said / together * step
    return max(playing, episodes * turns * found.seconds)


def trained_tokens(found: Episodes, rows: int, on_pairs: bool) -> float:
    """Tokens that one epoch reads, before sharing of prefixes."""
    sides = [found.turns, found.policy_turns(learned=True)] if on_pairs else [found.turns]
    return rows * sum(found.prompt + (turns - 1) * found.heard + turns * found.said for turns in sides)


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


def _how(machine: Machine, found: Episodes) -> list[str]:
    return [
        f"Lengths: {found.source}: {found.turns:.1f} turns, {found.prompt:.0f} tokens before the first action, then "
        f"{found.heard:.0f} heard and {found.said:.0f} said a turn; the turn limit is {found.limit:.0f}.",
        f"Speed: measured now on {machine.device}: {machine.many / 1e9:.0f} GFLOP/s and {machine.few / 1e9:.1f} GB/s "
        f"of weights ({machine.parameters / 1e6:.0f}M parameters).",
        "Accuracy: about a factor of two, if nothing else runs on the machine; docs/how-to/estimate.md has what is "
        "assumed and what was compared.",
    ]


def print_plan(plan: Plan, console: Console) -> None:
    """Print the plan as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("step", "", "work", "time", "memory"):
        table.add_column(name, justify="right" if name in ("time", "memory") else "left")
    for step in _together(plan.steps):
        about = "" if step.state == "done" else "~"
        seconds = "" if step.seconds is None else f"{about}{_duration(step.seconds)}"
        memory = "" if step.memory_gb is None else f"{about}{step.memory_gb:.1f} GB"
        table.add_row(step.name, step.state, step.work, seconds, memory)
    console.print(f"{plan.run}: nothing was done; this is what would be.", soft_wrap=True)
    console.print(table)
    console.print(f"left to do: ~{_duration(plan.seconds)}", style="bold")
    for line in plan.problems:
        console.print(line, style="red", markup=False, soft_wrap=True)
    for line in plan.how:
        console.print(line, style="dim", soft_wrap=True)


def _together(steps: Sequence[Planned]) -> Iterator[Planned]:
    """The steps, those of several iterations as one: its work is one iteration's, its time that of all."""
    kinds: dict[str, list[Planned]] = defaultdict(list)
    for step in steps:
        kinds[re.sub(r"-\d{3,}$", "", step.name)].append(step)
    for kind, several in kinds.items():
        if len(several) == 1:
            yield several[0]
            continue
        done = sum(step.state == "done" for step in several)
        seconds = [step.seconds for step in several if step.seconds is not None]
        yield Planned(
            f"{kind} x {len(several)}",
            "done" if done == len(several) else f"{done} done" if done else "to do",
            f"{several[0].work}, each time",
            sum(seconds) if seconds else None,
            max((step.memory_gb for step in several if step.memory_gb is not None), default=None),
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
