"""What a command would do, and what it may cost in time and memory: the `--dry-run` of every stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perturn.data.run_folder import read_stages, refuse_other, resolve_recipe, run_folder
from perturn.data.seals import read_manifest, refuse_damage, without_removed
from perturn.data.store import read_pairs
from perturn.policy.names import load_tokenizer
from perturn.policy.templates import chat_template
from perturn.policy.tokens import Renderer
from perturn.run.failures import has_failed
from perturn.run.loop import Step, check, loop, refuse_training
from perturn.run.plan.episodes import Panels, look_at_panels, try_out
from perturn.run.plan.estimate import (
    Machine,
    generation_gb,
    generation_seconds,
    trained_tokens,
    training_gb,
    training_seconds,
    turns_of,
)
from perturn.run.session import (
    choose_tasks,
    engine_settings,
    evaluation_sampling,
    make_protocol,
    world_maker,
)
from perturn.run.trackers import check_trackers
from perturn.settings.recipe import Recipe, Train, build
from perturn.table import locate
from perturn.tables import table

KEPT = 0.75
"""Share of explored episodes assumed to become pairs, before there are any."""


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
    """What a command would do."""

    run: str
    steps: list[Planned]
    how: list[str]
    """How the estimates were made, a sentence each."""
    problems: list[str]
    """What went wrong in the episodes that were played to see how long they are, a sentence each."""

    @property
    def seconds(self) -> float:
        """Of all that is left to do and was estimated."""
        return sum(step.seconds or 0.0 for step in self.steps if step.state != "done")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return dataclasses.asdict(self) | {"seconds": self.seconds}


def make_plan(source: Path, overrides: Sequence[str], command: str | None) -> Plan:
    """Check a recipe as a run would, and estimate what it costs; nothing is written.

    Args:
        source: The recipe, or a run folder.
        overrides: `key=value` words.
        command: The one command that would be given; None: the whole loop.

    Raises:
        PerturnError: Whatever the command itself would refuse before it starts.
    """
    recipe = resolve_recipe(source, overrides)
    refuse_other(recipe)
    manifest = read_manifest(run_folder(recipe)) or {}
    refuse_damage(run_folder(recipe), without_removed(run_folder(recipe), manifest.get("files", {}))[0])
    check_trackers(recipe.report_to)
    refuse_training(recipe, command)
    check(recipe, command)
    if command is None and recipe.sft is None:
        command = "evaluate"
    stages = read_stages(run_folder(recipe))
    steps = [step for step in loop(recipe) if command in (None, step.command)]
    if not engine_settings(recipe).serves_checkpoints:
        return _plan_of_api(recipe, steps, stages)
    renderer = Renderer(load_tokenizer(recipe.model.name), chat_template(recipe.model))
    panels = look_at_panels(recipe, renderer)
    machine = _machine(recipe, panels)
    planned = [_planned(recipe, step, stages, panels, machine) for step in steps]
    return Plan(str(run_folder(recipe)), planned, _how(machine, panels), list(panels.problems))


def _machine(recipe: Recipe, panels: Panels) -> Machine:
    lora = next((part.lora.rank for part in (recipe.sft, recipe.align) if part and part.lora), None)
    machine: Machine = locate("perturn.run.plan.rates:measure_machine")(recipe.model, lora, panels.memory_gb)
    return machine


def _planned(recipe: Recipe, step: Step, stages: dict[str, Any], panels: Panels, machine: Machine) -> Planned:
    """One step with its work, time and memory."""
    before = stages.get(step.name, {})
    work, seconds, memory = _cost(recipe, step, panels, machine)
    if before.get("done"):
        return Planned(step.name, "done", work, before.get("seconds"), before.get("peak_memory_gb"))
    return Planned(step.name, "to do", work, seconds, memory)


def _cost(recipe: Recipe, step: Step, panels: Panels, machine: Machine) -> tuple[str, float, float]:
    if step.name == "expert":
        return f"{panels.expert} episodes", panels.expert * panels.turns * panels.seconds, machine.base_gb
    if step.name == "pair":
        return f"{panels.explore} explored episodes", 1.0, machine.base_gb
    if step.command == "train":
        settings = recipe.sft if step.name == "sft" else recipe.align
        assert settings is not None
        return _training_cost(recipe, step.name, settings, panels, machine)
    explores = step.name == "explore"
    part = recipe.explore if explores else recipe.evaluate
    sampling = recipe.explore.sampling if explores else evaluation_sampling(recipe)
    episodes = panels.explore if explores else panels.evaluate
    learned = step.name != "evaluate-base"
    seconds = generation_seconds(
        machine, panels, episodes, part.concurrency, learned, sampling.max_new_tokens
    )
    memory = generation_gb(
        machine, panels, part.concurrency, float(recipe.engine.get("cache_gigabytes", 2.0))
    )
    return f"{episodes} episodes, about {turns_of(panels, learned):.0f} turns each", seconds, memory


def _training_cost(
    recipe: Recipe, name: str, settings: Train, panels: Panels, machine: Machine
) -> tuple[str, float, float]:
    loss = build(table("losses"), settings.loss, f"{name}.loss")
    rows, what = panels.sft, "episodes"
    if name == "align":
        file = run_folder(recipe) / "pairs.jsonl"
        rows = len(read_pairs(file)) if file.is_file() else round(KEPT * panels.explore)
        what = "pairs" if file.is_file() else "pairs (assumed)"
    tokens = trained_tokens(panels, rows, name == "align")
    longest = tokens / max(rows, 1)
    work = f"{rows} {what}, {settings.epochs:g} epochs, about {tokens * settings.epochs / 1000:.0f}k tokens"
    seconds = training_seconds(machine, settings, tokens, loss.needs_reference)
    return work, seconds, training_gb(machine, settings, longest)


def _try_out(recipe: Recipe) -> list[str]:
    """What goes wrong in the first episode of the evaluation, where no engine is needed to see it."""
    env = world_maker(recipe)()
    try:
        played = try_out(env, choose_tasks(env, recipe.evaluate.tasks)[0], make_protocol(recipe.protocol))
    finally:
        env.close()
    return [f"the episode played now failed: {played.error}"] if has_failed(played) else []


def _plan_of_api(recipe: Recipe, steps: Sequence[Step], stages: dict[str, Any]) -> Plan:
    """A server's time and price are not ours to know."""
    planned = []
    for step in steps:
        before = stages.get(step.name, {})
        state = "done" if before.get("done") else "to do"
        planned.append(
            Planned(step.name, state, step.command, before.get("seconds"), before.get("peak_memory_gb"))
        )
    bound = recipe.engine.get("max_cost") or recipe.engine.get("max_tokens_total")
    spends = (
        f"engine's bound: {bound}" if bound else "no bound: set engine.max_cost or engine.max_tokens_total"
    )
    how = [f"Time is the server's and is not estimated. What it may spend: {spends}."]
    return Plan(str(run_folder(recipe)), planned, how, _try_out(recipe))


def _how(machine: Machine, panels: Panels) -> list[str]:
    shape, rates = machine.shape, machine.rates
    return [
        f"Lengths: {panels.source}: {panels.turns:.1f} turns, {panels.prompt_tokens:.0f} tokens before the first "
        f"action, then {panels.heard_tokens:.0f} heard and {panels.said_tokens:.0f} said a turn; the turn limit is "
        f"{panels.limit:.0f}.",
        f"Speed: measured now on {machine.device}: {rates.many / 1e9:.0f} GFLOP/s and {rates.few / 1e9:.1f} GB/s of "
        f"weights in matrices of the model's size ({shape.parameters / 1e6:.0f}M parameters).",
        "Accuracy: time within a factor of about 2, memory within about a half, if nothing else runs on the machine; "
        "an untaught policy is assumed to use all turns and tokens it may, a taught one half of the turns beyond the "
        "expert's. docs/how-to/estimate.md has what was compared.",
    ]


def print_plan(plan: Plan, console: Console) -> None:
    """Print the plan as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("step", "", "work", "time", "memory"):
        table.add_column(name, justify="right" if name in ("time", "memory") else "left")
    for step in plan.steps:
        about = "" if step.state == "done" else "~"
        table.add_row(
            step.name,
            step.state,
            step.work,
            "" if step.seconds is None else f"{about}{_duration(step.seconds)}",
            "" if step.memory_gb is None else f"{about}{step.memory_gb:.1f} GB",
        )
    console.print(f"{plan.run}: nothing was done; this is what would be.", soft_wrap=True)
    console.print(table)
    console.print(f"left to do: ~{_duration(plan.seconds)}", style="bold")
    for line in plan.problems:
        console.print(line, style="red", markup=False, soft_wrap=True)
    for line in plan.how:
        console.print(line, style="dim", soft_wrap=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
