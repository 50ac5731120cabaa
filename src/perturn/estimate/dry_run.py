"""The `--dry-run` of every command: a plan of its stages, with estimated time and memory."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from perturn.config.recipe import Recipe
from perturn.config.stages import Stage, stages
from perturn.data.file_seals import done_stages, read_manifest, refuse_damage, without_removed
from perturn.data.run_folder import resolve_recipe, run_folder
from perturn.estimate.episode_lengths import Episodes, look_at_episodes, renderer_of
from perturn.estimate.overlap import copies_of, predict, replicas_of, side_by_side
from perturn.estimate.side_model_costs import side_model_costs
from perturn.estimate.stage_costs import (
    KEPT_BY_ALLOCATOR,
    REPORT_SECONDS,
    fitting_seconds,
    judged_tokens,
    opening_seconds,
    passing_seconds,
    playing_gb,
    rollout_seconds,
    trained_tokens,
    training_seconds,
)
from perturn.estimate.training_work import (
    corrected_episodes,
    expected_branches,
    training_work,
    weighed_episodes,
)
from perturn.rules import TurnControl
from perturn.run.execute import check, refuse_early
from perturn.run.protocol_rules import evaluation_sampling, ruled
from perturn.run.served_policy import engine_settings
from perturn.run.session import backend_settings
from perturn.run.stages.branch_stage import explorer_of
from perturn.run.stages.collect_stage import AT_ONCE
from perturn.table import locate
from perturn.train_processes import usable_cores

if TYPE_CHECKING:
    from perturn.estimate.machine_speed import Machine


@dataclass(frozen=True)
class Planned:
    """A step of the plan."""

    name: str
    state: str
    """`done` or `to do`."""
    work: str
    seconds: float | None
    """Estimated seconds, or measured seconds if the step is done; None: not estimated."""
    memory_gb: float | None
    """Memory in gigabytes of each training process, or of the command's process; None: not estimated."""
    processes: int = 1
    """Number of processes that train together."""


@dataclass(frozen=True)
class Plan:
    """The plan of a command."""

    run: str
    steps: list[Planned]
    how: list[str]
    """Sentences on how the estimates were made."""
    problems: list[str]
    """Sentences on failures of the episodes that were played to measure lengths."""
    too_large: list[str] = field(default_factory=list)
    """Sentences on trainings that do not fit into a GPU's memory, with settings with which they would fit."""
    startup: float = 0.0
    """Seconds before the first step and after the last step: imports, checks, and the report of a run."""

    @property
    def seconds(self) -> float:
        """Estimated seconds of all steps that are not done, start-up included."""
        return self.startup + sum(step.seconds or 0.0 for step in self.steps if step.state != "done")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return asdict(self) | {"seconds": self.seconds}


def make_plan(
    source: Path | Recipe,
    overrides: Sequence[str],
    command: str | None,
    began: float | None = None,
    gpu_gb: float | None = None,
) -> Plan:
    """Check a recipe as a run does, and estimate its time and memory; nothing is written.

    Args:
        source: The recipe, its file, or a run folder.
        overrides: Overrides of settings, as `key=value`.
        command: The command to plan, such as `train`; None: the whole loop.
        began: Unix time at which this process started, so that its imports count; None: now.
        gpu_gb: Memory of a GPU to plan for, in gigabytes; None: the GPUs of this machine.

    Raises:
        PerturnError: If the command itself would fail before it starts.
    """
    began = time.time() if began is None else began
    recipe = ruled(resolve_recipe(source, overrides))
    refuse_early(recipe, command)
    folder = run_folder(recipe)
    manifest = read_manifest(folder)
    seals, removed = without_removed(folder, manifest["files"])
    refuse_damage(folder, seals)
    task_lists = check(recipe, command)
    startup = _import_stages(recipe, command) - began + (REPORT_SECONDS if command is None else 0.0)
    engine, backend, machine = engine_settings(recipe), backend_settings(recipe), None
    found = look_at_episodes(
        recipe, task_lists, renderer_of(recipe) if engine.traits.serves_checkpoints else None
    )
    if "models" not in backend.traits.provides:
        how = [f"The time of the backend {recipe.backend['name']} is not estimated: it trains and answers."]
    elif engine.traits.serves_checkpoints:
        model = locate("perturn.run.stages.model_checks:empty_base")(recipe)
        machine = _measured(recipe, model, found)
        how = _how(machine, found, recipe.environment is not None)
    else:
        how = [f"Time is the server's and is not estimated. What it may spend: {engine.traits.spending}."]
    how += side_model_costs(recipe, found)
    done, steps = done_stages(manifest) - removed, []
    for stage in stages(recipe):
        if command in (None, stage.command):
            work, seconds, memory = _cost(recipe, stage, found, machine)
            state = "done" if stage.name in done else "to do"
            if state == "done":
                before = manifest["stages"][stage.name]
                seconds, memory = before.get("seconds"), before.get("peak_memory_gb")
            several = recipe.launch.processes if stage.command == "train" else 1
            steps.append(Planned(stage.name, state, work, seconds, memory, several))
    too_large: list[str] = []
    if machine is not None:
        left = [step.name for step in steps if step.state != "done"]
        fitting, too_large = _fitting(recipe, left, found, machine, gpu_gb)
        how += fitting + side_by_side(recipe, machine.shape)
        if recipe.staleness and command is None:
            how.append(_overlapping(recipe, found, steps))
    return Plan(str(folder), steps, how, list(found.problems), too_large, startup)


def _fitting(
    recipe: Recipe, left: Sequence[str], found: Episodes, machine: Machine, gpu_gb: float | None
) -> tuple[list[str], list[str]]:
    """Return sentences on the GPU memory of trainings that are not done: first those that fit, then the others."""
    gpus = locate("perturn.estimate.fit:gpus_here")(gpu_gb)
    fit: list[str] = []
    too_large: list[str] = []
    seen = set()
    for stage in stages(recipe):
        if stage.name in left and stage.command == "train" and stage.section not in seen:
            seen.add(stage.section)
            work = training_work(recipe, stage, found)
            training = locate("perturn.estimate.fit:training_of")(recipe, stage, work, found, machine, "cuda")
            engine = locate("perturn.estimate.fit:engine_bytes")(recipe, stage, found, training, gpus)
            said, fits = locate("perturn.estimate.fit:say_fit")(stage.section, training, gpus, engine)
            (fit if fits else too_large).append(said)
    return fit + [locate("perturn.estimate.fit:ACCURACY")] * bool(fit or too_large), too_large


def _training_cost(
    recipe: Recipe, stage: Stage, found: Episodes, machine: Machine | None
) -> tuple[str, float | None, float | None]:
    """Return a training's work in words, its seconds, and the gigabytes of each process."""
    work, processes = training_work(recipe, stage, found), recipe.launch.processes
    if machine is None:
        return work.text, None, None
    loss = locate("perturn.training.credit_choice:make_loss")(work.settings.loss).traits
    seconds = training_seconds(machine, work.settings, work.tokens, loss.needs_reference, processes)
    ranked = locate("perturn.training.pair_ranking:ranked")(
        recipe, stage.section, loss.needs_rejected, work.rows
    )
    seconds += passing_seconds(machine, 2 * work.tokens * ranked / max(1, work.rows))
    seconds += fitting_seconds(machine, work.settings, work.rows, processes)
    training = locate("perturn.estimate.fit:training_of")(recipe, stage, work, found, machine, machine.device)
    engine = locate("perturn.estimate.fit:engine_bytes")(recipe, stage, found, training)
    beside = machine.base_gb * 1e9 + engine * (processes == 1 or machine.device == "cuda")
    return work.text, seconds, locate("perturn.estimate.fit:needed")(training, machine.device, beside) / 1e9


def _overlapping(recipe: Recipe, found: Episodes, steps: Sequence[Planned]) -> str:
    """Return a sentence on the time that is saved if exploration and training overlap."""
    marked = [step for step in steps if re.search(r"-\d{3,}$", step.name)]
    explores = [step.seconds or 0.0 for step in marked if step.name.startswith("explore")]
    others = [step.seconds or 0.0 for step in marked if not step.name.startswith("explore")]
    return predict(recipe, found, fmean(explores), others)


def _import_stages(recipe: Recipe, command: str | None) -> float:
    """Import the modules of the stages, as a run does; return the Unix time afterwards."""
    for stage in stages(recipe):
        if command in (None, stage.command):
            locate(stage.does)
    if command in (None, "evaluate"):
        locate("perturn.report:write_report")
    return time.time()


def _measured(recipe: Recipe, model: Any, found: Episodes) -> Machine:
    """Measure the machine; if the run trains a small model, also measure the model's whole passes."""
    machine: Machine = locate("perturn.estimate.machine_speed:measure_machine")(
        model, recipe.model.dtype, found.memory_gb
    )
    settings = next((part for part in (recipe.align, recipe.sft, recipe.base) if part), None)
    if settings is None:
        return machine
    turns = [round(found.prompt)]
    for _ in range(max(1, round(found.policy_turns(learned=True)))):
        turns += [max(1, round(found.policy_said())), round(found.heard)]
    found_now: Machine = locate("perturn.estimate.machine_speed:measure_passes")(
        machine, model, turns[:-1], settings.token_budget
    )
    return found_now


def _cost(
    recipe: Recipe, stage: Stage, found: Episodes, machine: Machine | None
) -> tuple[str, float | None, float | None]:
    """Return a stage's work in words, its seconds and gigabytes; without `machine`, only the work is estimated."""
    if stage.name in ("expert", "lessons"):
        file, episodes = recipe.expert and recipe.expert.file, getattr(found, stage.name)
        work = f"episodes of {file}" if file and stage.name == "expert" else f"{episodes} episodes"
        opening = opening_seconds(None, found, episodes, AT_ONCE, usable_cores())
        return work, opening + episodes * found.turns * found.seconds, found.memory_gb
    if stage.command == "credit":
        return _credit_cost(recipe, found, machine)
    if stage.command == "pair":
        own, times = recipe.rows and recipe.rows.traits.source, corrected_episodes(recipe, found)
        work = f"{found.explore} explored episodes" + (f", {times} corrections (assumed)" if times else "")
        played = 2 * times  # replays the policy's part, then plays the whole episode
        return f"rows of {own}" if own else work, 1.0 + played * found.turns * found.seconds, found.memory_gb
    if stage.command == "train":
        return _training_cost(recipe, stage, found, machine)
    return _playing_cost(recipe, stage, found, machine)


def _playing_cost(
    recipe: Recipe, stage: Stage, found: Episodes, machine: Machine | None
) -> tuple[str, float | None, float | None]:
    """Return an exploration's or evaluation's work in words, its seconds and gigabytes."""
    explores = stage.command == "collect"
    learned = found.most is None and (bool(recipe.base) or stage.name != "evaluate-base")
    part, episodes = (recipe.explore, found.explore) if explores else (recipe.evaluate, found.evaluate)
    assert part is not None
    if explores and recipe.explore and recipe.explore.traits.source is not None:
        return f"episodes of {recipe.explore.traits.source}", 1.0, found.memory_gb
    if not explores and recipe.evaluate and recipe.evaluate.turns:
        found = _controlled(found, recipe.evaluate.turns)
    candidates, has_head = 1, False
    if not explores and recipe.evaluate:
        episodes *= recipe.evaluate.samples * recipe.evaluate.candidates("episodes")
        candidates, has_head = recipe.evaluate.candidates("actions"), "explored" in recipe.evaluate.needs
    learned_from = f"{found.explore} {'explored episodes' if recipe.explore else 'episodes of another run'}"
    work = (
        f"{episodes} episodes of split {part.tasks.split}, about {found.policy_turns(learned):.0f} turns each"
        + (f", {candidates} actions a turn" if candidates > 1 else "")
        + (f", chosen by a value head trained on {learned_from}" if has_head else "")
    )
    if stage.name == f"branch{stage.mark}":
        expected, policy = (
            expected_branches(recipe, found, found.policy_turns(learned)),
            explorer_of(recipe).traits.policy,
        )
        by = f" by {policy}" if policy else ""
        work = f"{expected.played} continuations{by} from turns of {expected.begun} episodes (assumed)"
        episodes = ceil(expected.played * expected.share)
    if machine is None:
        return work, None, None
    most = (part.sampling if explores and part.sampling else evaluation_sampling(recipe)).max_new_tokens
    if found.most is not None:
        most = ceil(found.policy_said(most))
    copies, on_nodes = copies_of(recipe), bool(replicas_of(recipe))
    concurrency = part.concurrency
    seconds = rollout_seconds(
        machine, found, episodes, concurrency, learned, most, candidates, copies=copies, on_nodes=on_nodes
    )
    if has_head:
        seconds += passing_seconds(machine, 2 * judged_tokens(found, episodes, at_turns=candidates > 1))
    if on_nodes:
        return work, seconds, found.memory_gb
    limit = engine_settings(recipe).traits.cache_gigabytes
    together = min(max(1, concurrency // copies), ceil(episodes / copies))
    return work, seconds, playing_gb(machine, found, together, learned, limit)


def _credit_cost(recipe: Recipe, found: Episodes, machine: Machine | None) -> tuple[str, float, float]:
    """Return work, seconds and gigabytes of a credit stage: forward passes for the quantities that the credit reads."""
    assert recipe.credit is not None
    needs = locate("perturn.training.credit_choice:make_credit")(recipe.credit).needs
    wanted = locate("perturn.quantities:wanted")(needs)
    passes = {
        name: quantity.traits.passes for name, (quantity, _) in wanted.items() if quantity.traits.passes
    }
    members = weighed_episodes(recipe, found)
    with_branches = f" and {members - found.explore} branches" if members > found.explore else ""
    work = f"groups of {found.explore} explored episodes{with_branches}" + (
        f", read for {', '.join(passes)}" if passes else ""
    )
    if machine is None or not passes:
        return work, 1.0, found.memory_gb
    tokens = trained_tokens(found, members, on_pairs=False, own=True)
    seconds = 1.0 + passing_seconds(machine, 2 * sum(passes.values()) * tokens)
    return work, seconds, (machine.base_gb + machine.parameters * machine.bytes / 1e9) * KEPT_BY_ALLOCATOR


def _controlled(found: Episodes, control: TurnControl) -> Episodes:
    """Return lengths for an evaluation with controlled turns, assuming that every extension of the limit is used."""
    limit = (control.limit or found.limit) + (control.extend or 0) * control.times
    return replace(found, limit=limit, turns=min(found.turns, limit))


def _how(machine: Machine, found: Episodes, plays: bool) -> list[str]:
    """Return sentences on the origin of the estimates; `plays` says whether the run has an environment."""
    limit = f" The turn limit is {found.limit:.0f}." if plays else ""
    return [
        f"Lengths: {found.source}; on average {found.turns:.1f} turns, {found.prompt:.0f} prompt tokens before the "
        f"first action, and per turn {found.said:.0f} tokens of action and {found.heard:.0f} tokens of observation."
        f"{limit}",
        f"Speed: measured now on {machine.device}: {machine.many / 1e9:.0f} GFLOP/s in a batch, and "
        f"{machine.few / 1e9:.1f} GB/s of weights read token by token ({machine.parameters / 1e6:.0f}M parameters)."
        + (
            f" Other programs on this machine slow it down {machine.crowd:.1f} times."
            if machine.crowd > 1.1
            else ""
        ),
        "Accuracy of times: within a factor of two, if other programs keep the machine as busy as now. "
        "docs/how-to/estimate.md lists the assumptions and the runs they were compared with.",
    ]


def print_plan(plan: Plan, console: Console) -> None:
    """Print the plan as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("step", "", "work", "time", "memory"):
        table.add_column(name, justify="right" if name in ("time", "memory") else "left")
    for step in _together(plan.steps):
        about = "" if step.state == "done" else "~"
        seconds = "" if step.seconds is None else f"{about}{_duration(step.seconds)}"
        each = f" x {step.processes}" if step.processes > 1 and step.state != "done" else ""
        memory = "" if step.memory_gb is None else f"{about}{step.memory_gb:.1f} GB{each}"
        table.add_row(step.name, step.state, step.work, seconds, memory)
    if plan.startup:
        about = f"~{_duration(plan.startup)}"
        table.add_row("start-up", "", "imports, checks and the report", about, "")
    console.print(f"{plan.run}: ~{_duration(plan.seconds)} left to do", style="bold", soft_wrap=True)
    console.print("This is a dry run: nothing was trained or written.", soft_wrap=True)
    console.print(table)
    for line in plan.problems + plan.too_large:
        console.print(line, style="red", markup=False, soft_wrap=True)
    for line in plan.how:
        console.print(line, style="dim", soft_wrap=True)


def _together(steps: Sequence[Planned]) -> Iterator[Planned]:
    """Yield the steps; equal steps of several iterations become one, with the summed time."""
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
            several[0].processes,
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
