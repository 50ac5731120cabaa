"""The stage that evaluates a policy on the held-out tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perturn.config.evaluation_settings import Evaluate
from perturn.config.parsing import to_mapping
from perturn.config.sections import Section
from perturn.config.stages import Stage, stages, suffix_of
from perturn.data.episode_outcomes import outcomes
from perturn.data.run_files import Stamp, read_note
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories, write_records
from perturn.episodes.prompts import system_prompt
from perturn.episodes.seeds import make_jobs
from perturn.errors import RunError
from perturn.io.atomic_write import write_whole
from perturn.run.policy_origin import noted_maker
from perturn.run.protocol_rules import evaluation_sampling
from perturn.run.served_policy import engine_settings
from perturn.run.session import Session
from perturn.run.stages.evaluation_strategy import Strategy, controlled, extension_counts
from perturn.run.stages.measure_distance import measured
from perturn.run.stages.selection import Selection, candidate_counts
from perturn.run.task_lists import task_list_digest
from perturn.select.lookup import traits_of
from perturn.types import EpisodeProtocol, Sampling, Task, Trajectory

_SHARED = ("name", "prompt_sha256", "max_turns", "decoding")
"""Conditions that must be equal for all scores of a run, whatever the version of Perturn."""


def evaluate(session: Session, stage: Stage) -> None:
    """Play the evaluation tasks with a policy, and record the conditions of the evaluation."""
    run, recipe = session.run, session.recipe
    settings, tasks = recipe.evaluate, session.task_lists.tasks["evaluate"]
    assert settings is not None
    jobs = make_jobs(tasks, recipe.seed, settings.samples * settings.candidates("episodes"))
    file, drawn = run.paths.evaluation(stage.policy), run.paths.drawn(stage.policy)
    selection = Selection(run, stage.policy, settings.select) if settings.select else None
    reranks, draws = settings.candidates("actions") > 1, settings.candidates("episodes") > 1
    strategy = Strategy(turns=settings.turns)
    if selection and reranks:
        strategy = dataclasses.replace(strategy, serve=selection.serving(jobs))
    played, maker = drawn if draws else file, noted_maker(run, stage.policy)
    conditions = _conditions(session, settings)
    _refuse_other_rules(run, conditions)
    with run.stage(stage.name, file, *([drawn] if draws else ())) as counts:
        write_whole(run.paths.stamp, json.dumps(conditions | maker, indent=2) + "\n")
        counts |= session.play(
            played,
            jobs,
            stage.policy,
            evaluation_sampling(recipe),
            settings.concurrency,
            f"evaluating {stage.policy}",
            strategy,
            judged=recipe.judge is not None and recipe.judge.evaluates,
        )
        if settings.turns:
            rules = controlled(session.rules(stage.policy), settings.turns)
            counts |= extension_counts(read_trajectories(played), rules)
        if selection and draws:
            counts |= _choose(session, selection, drawn, file)
        if reranks:
            counts |= candidate_counts(read_trajectories(file))
        if selection:
            counts |= selection.counts()
        if settings.distance:
            _measure(session, settings.distance, file)


def _refuse_other_rules(run: Run, conditions: Mapping[str, Any]) -> None:
    """Reject an evaluation whose rules differ from the rules of the run's earlier scores.

    The rules of a named protocol may change between versions of Perturn.
    """
    before = read_note(run.paths.stamp, Stamp) or {}
    changed = [key for key in _SHARED if before.get(key, conditions[key]) != conditions[key]]
    if not changed:
        return
    keep = ""
    if changed == ["decoding"]:
        keep = f"To keep that decoding, add evaluate.sampling='{json.dumps(before['decoding'])}'. "
    values = "; ".join(f"{key} is {before[key]!r} there and {conditions[key]!r} here" for key in changed)
    raise RunError(
        f"{run.folder} has scores under other rules: {values}. {keep}To score under the present rules, score all "
        "policies again under another name (name=...)."
    )


def _measure(session: Session, sense: str, file: Path) -> None:
    """Write the distance to a success around each turn into the scored episodes, except FAILED episodes."""
    _rewrite(file, measured(session.recipe, read_trajectories(file), sense))


def _rewrite(file: Path, episodes: Sequence[Trajectory]) -> None:
    """Replace the scored episodes in a policy's file, all or none."""
    write_records(file, episodes)


def _conditions(session: Session, settings: Evaluate) -> dict[str, Any]:
    """Return the conditions of a run's evaluations, including judge, user and selector."""
    recipe = session.recipe
    found = stamp(
        session.task_lists.environment,
        recipe.environment,
        settings.tasks.split,
        session.task_lists.tasks["evaluate"],
        controlled(session.protocol, settings.turns),
        evaluation_sampling(recipe),
        recipe.seed,
    )
    asked = {
        each.policy: suffix_of(recipe, each.policy) for each in stages(recipe) if each.command == "train"
    }
    suffixes = {policy: suffix for policy, suffix in asked.items() if suffix is not None}
    found |= {"told": suffixes} if suffixes else {}
    found |= {"judge": to_mapping(recipe.judge)} if recipe.judge and recipe.judge.evaluates else {}
    found |= {"samples": settings.samples} if settings.samples > 1 else {}
    found |= {"user": to_mapping(recipe.user)} if recipe.user else {}
    request = engine_settings(recipe).traits.request
    found |= {"request": {**request}} if request else {}
    if settings.select is None:
        return found
    seen = {"sees_outcome": True} if traits_of(settings.select).sees_outcome else {}
    return found | {"select": {**settings.select, **seen}}


def _choose(session: Session, selection: Selection, drawn: Path, file: Path) -> dict[str, Any]:
    """Choose the best episode of each task for the score, and write it; return counts of chosen and of all episodes."""
    session.release()  # the selector may load models of its own
    episodes = sorted(read_trajectories(drawn), key=lambda one: one.key)
    chosen = selection.best(episodes)
    _rewrite(file, chosen)
    return outcomes(chosen) | {f"drawn_{name}": count for name, count in outcomes(episodes).items()}


def stamp(
    environment: str,
    settings: Section | None,
    split: str,
    tasks: Sequence[Task],
    protocol: EpisodeProtocol,
    sampling: Sampling,
    seed: int,
) -> dict[str, Any]:
    """Return the conditions of an evaluation for `evaluation/protocol.json`.

    Args:
        environment: Name and version of the environment.
        settings: The section `environment` of the recipe, or None.
        split: Split of the tasks.
        tasks: The task list.
        protocol: Rules of the episodes.
        sampling: Decoding of actions.
        seed: Seed of the episodes.
    """
    return {
        "environment": environment,
        "settings": settings,
        "split": split,
        "n": len(tasks),
        "panel_sha256": task_list_digest(tasks),
        **_rules(protocol, tasks),
        "decoding": dataclasses.asdict(sampling),
        "departures": _departures(protocol, sampling),
        "seed": seed,
    }


def _rules(protocol: EpisodeProtocol, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the parts of a protocol that must be equal for two scores to be comparable."""
    prompt = json.dumps(system_prompt(protocol), sort_keys=True)
    return {
        "name": f"{protocol.name}-{protocol.format}",
        "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
        "max_turns": dict(sorted({task.kind: protocol.limit(task) for task in tasks}.items())),
        **({"turns": dataclasses.asdict(protocol.turns)} if protocol.turns else {}),
        "history": "full" if protocol.history is None else protocol.history,
        "list_admissible": protocol.list_admissible,
        **({"suffix": protocol.suffix} if protocol.suffix else {}),
    }


def _departures(protocol: EpisodeProtocol, sampling: Sampling) -> dict[str, dict[str, float]]:
    """Return the decoding settings in which a run departs from its protocol, with both values."""
    if protocol.sampling is None:
        return {}
    theirs, ours = dataclasses.asdict(protocol.sampling), dataclasses.asdict(sampling)
    return {
        name: {"protocol": theirs[name], "here": value}
        for name, value in ours.items()
        if value != theirs[name]
    }
