"""The `--dry-run` of every command: its stages, with an estimate of their time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perturn.audit.rows import read_rows
from perturn.data.run_folder import read_stages, refuse_other, resolve_recipe, run_folder
from perturn.data.seals import read_manifest, refuse_damage, without_removed
from perturn.io.reading import user_path
from perturn.policy.names import load_tokenizer
from perturn.policy.templates import chat_template
from perturn.policy.tokens import Renderer
from perturn.run.loop import check, refuse_command, refuse_training
from perturn.run.plan.episodes import Panels, look_at_panels
from perturn.run.plan.estimate import (
    Machine,
    generation_gb,
    generation_seconds,
    trained_tokens,
    training_gb,
    training_seconds,
    turns_of,
)
from perturn.run.session import engine_settings, evaluation_sampling
from perturn.run.trackers import check_trackers
from perturn.settings.recipe import Recipe
from perturn.settings.stages import Stage, stages
from perturn.table import locate

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
        return dataclasses.asdict(self) | {"seconds": self.seconds}


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
    refuse_other(recipe)
    folder = run_folder(recipe)
    refuse_damage(folder, without_removed(folder, (read_manifest(folder) or {}).get("files", {}))[0])
    check_trackers(recipe.report_to)
    refuse_command(recipe, command)
    refuse_training(recipe, command)
    check(recipe, command)
    done = read_stages(folder)
    steps = [step for step in stages(recipe) if command in (None, step.command)]
    served = not engine_settings(recipe).serves_checkpoints
    renderer = None if served else Renderer(load_tokenizer(recipe.model.name), chat_template(recipe.model))
    panels = look_at_panels(recipe, renderer)
    measure = locate("perturn.run.plan.rates:measure_machine")
    machine: Machine | None = None if served else measure(recipe.model, panels.memory_gb)
    planned = [_planned(recipe, step, done.get(step.name, {}), panels, machine) for step in steps]
    how = _how(machine, panels) if machine else _how_served(recipe)
    return Plan(str(folder), planned, how, list(panels.problems))


def _planned(
    recipe: Recipe, step: Stage, before: dict[str, Any], panels: Panels, machine: Machine | None
) -> Planned:
    """One step with its work, time and memory; `before` is its record in the manifest."""
    work, seconds, memory = _cost(recipe, step, panels, machine)
    if before.get("done"):
        return Planned(step.name, "done", work, before.get("seconds"), before.get("peak_memory_gb"))
    return Planned(step.name, "to do", work, seconds, memory)


def _cost(
    recipe: Recipe, step: Stage, panels: Panels, machine: Machine | None
) -> tuple[str, float | None, float | None]:
    """Work, seconds and gigabytes; without a machine of ours only the work is known."""
    if step.name == "expert":
        return f"{panels.expert} episodes", panels.expert * panels.turns * panels.seconds, panels.memory_gb
    if step.command == "pair":
        return f"{panels.explore} explored episodes", 1.0, panels.memory_gb
    if step.command == "train" and machine:
        return _training_cost(recipe, step.name != "sft", panels, machine)
    explores, learned = step.command == "collect", step.name != "evaluate-base"
    part, episodes = (recipe.explore, panels.explore) if explores else (recipe.evaluate, panels.evaluate)
    assert part is not None
    most = (part.sampling if explores and part.sampling else evaluation_sampling(recipe)).max_new_tokens
    work = f"{episodes} episodes, about {turns_of(panels, learned):.0f} turns each"
    if machine is None:
        return work, None, None
    seconds = generation_seconds(machine, panels, episodes, part.concurrency, learned, most)
    return work, seconds, generation_gb(machine, float(recipe.engine.get("cache_gigabytes", 2.0)))


def _training_cost(
    recipe: Recipe, on_pairs: bool, panels: Panels, machine: Machine
) -> tuple[str, float, float]:
    settings = recipe.align if on_pairs else recipe.sft
    assert settings is not None
    rows, what = panels.sft, "episodes"
    if on_pairs:
        own = recipe.pair and recipe.pair.file
        file = user_path(own, "pair.file") if own else run_folder(recipe) / "pairs.jsonl"
        rows = sum(1 for _ in read_rows(file)) if file.is_file() else round(KEPT * panels.explore)
        what = "pairs" if file.is_file() else "pairs (assumed)"
    tokens = trained_tokens(panels, rows, on_pairs)
    work = f"{rows} {what}, {settings.epochs:g} epochs, about {tokens * settings.epochs / 1000:.0f}k tokens"
    return work, training_seconds(machine, settings, tokens, on_pairs), training_gb(machine, settings)


def _how_served(recipe: Recipe) -> list[str]:
    bound = recipe.engine.get("max_cost") or recipe.engine.get("max_tokens_total")
    spends = (
        f"engine's bound: {bound}" if bound else "no bound: set engine.max_cost or engine.max_tokens_total"
    )
    return [f"Time is the server's and is not estimated. What it may spend: {spends}."]


def _how(machine: Machine, panels: Panels) -> list[str]:
    return [
        f"Lengths: {panels.source}: {panels.turns:.1f} turns, {panels.prompt:.0f} tokens before the first action, then "
        f"{panels.heard:.0f} heard and {panels.said:.0f} said a turn; the turn limit is {panels.limit:.0f}.",
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
    for step in plan.steps:
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


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
