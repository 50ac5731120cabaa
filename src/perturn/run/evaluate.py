"""Score policies on one panel of held-out tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perturn.data.outcomes import outcomes
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.episodes.episode import Job
from perturn.episodes.prompts import system_prompt
from perturn.episodes.seeds import make_jobs
from perturn.io.writing import write_whole
from perturn.run.best_of import best_of
from perturn.run.maker import noted_maker
from perturn.run.panels import panel_digest
from perturn.run.rerank import candidate_counts, reranking
from perturn.run.session import Session, evaluation_sampling
from perturn.run.strategies import Strategy, controlled, extension_counts
from perturn.run.valued import Values
from perturn.settings.evaluation import Evaluate
from perturn.settings.sections import Section
from perturn.settings.stages import VALUE, Stage, chosen_by, stages, suffix_of
from perturn.types import EpisodeProtocol, Sampling, Task


def evaluate(session: Session, stage: Stage) -> None:
    """Play the evaluation panel with a policy and stamp the protocol."""
    run, recipe = session.run, session.recipe
    settings, tasks = recipe.evaluate, session.panels.tasks["evaluate"]
    assert settings is not None
    jobs = make_jobs(tasks, recipe.seed, settings.best_of.samples if settings.best_of else 1)
    file, drawn = run.paths.evaluation(stage.policy), run.paths.drawn(stage.policy)
    values, maker = Values(run, stage.policy), noted_maker(run, stage.policy)
    with run.stage(stage.name, file, *([drawn] if settings.best_of else ())) as counts:
        write_whole(run.paths.stamp, json.dumps(_conditions(session, settings) | maker, indent=2) + "\n")
        counts |= session.play(
            drawn if settings.best_of else file,
            jobs,
            stage.policy,
            evaluation_sampling(recipe),
            settings.concurrency,
            f"evaluating {stage.policy}",
            _strategy(run, stage.policy, jobs, values),
        )
        if settings.turns:
            rules = controlled(session.rules(stage.policy), settings.turns)
            counts |= extension_counts(read_trajectories(drawn if settings.best_of else file), rules)
        if settings.best_of:
            counts |= _choose(session, stage.policy, drawn, file, values)
        if settings.rerank:
            counts |= candidate_counts(read_trajectories(file))
        if chosen_by(recipe) == VALUE:
            counts |= values.counts()


def _strategy(run: Run, policy: str, jobs: Sequence[Job], values: Values) -> Strategy:
    """How the episodes of an evaluation are played."""
    assert run.recipe.evaluate is not None
    settings = run.recipe.evaluate
    plain = Strategy(turns=settings.turns)
    if settings.rerank is None:
        return plain
    return dataclasses.replace(plain, serve=reranking(run, policy, jobs, values))


def _conditions(session: Session, settings: Evaluate) -> dict[str, Any]:
    """The stamp of the scores of a run, with how their episodes or actions are chosen."""
    recipe = session.recipe
    found = stamp(
        session.panels.environment,
        recipe.environment,
        settings.tasks.split,
        session.panels.tasks["evaluate"],
        controlled(session.protocol, settings.turns),
        evaluation_sampling(recipe),
        recipe.seed,
    )
    asked = {
        each.policy: suffix_of(recipe, each.policy) for each in stages(recipe) if each.command == "train"
    }
    told = {policy: suffix for policy, suffix in asked.items() if suffix is not None}
    found |= {"told": told} if told else {}
    found |= {"best_of": dataclasses.asdict(settings.best_of)} if settings.best_of else {}
    return found | ({"rerank": dataclasses.asdict(settings.rerank)} if settings.rerank else {})


def _choose(session: Session, policy: str, drawn: Path, file: Path, values: Values) -> dict[str, Any]:
    """Write the best of several episodes of each task as those that are scored; counts of these, and of all."""
    session.release()  # what chooses may load models of its own
    episodes = sorted(read_trajectories(drawn), key=lambda one: one.key)
    chosen = best_of(session.run, policy, episodes, values)
    file.unlink(missing_ok=True)
    with TrajectoryStore(file) as store:
        for one in chosen:
            store.append(one)
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
    """The conditions of a score, as `evaluation/protocol.json` holds them.

    Args:
        environment: Its name and version.
        settings: The section `environment`, if there is one.
        split: Of the tasks.
        tasks: The panel.
        protocol: Rules of the episodes.
        sampling: How actions are decoded.
        seed: Of the episodes.
    """
    return {
        "environment": environment,
        "settings": settings,
        "split": split,
        "n": len(tasks),
        "panel_sha256": panel_digest(tasks),
        **_rules(protocol, tasks),
        "decoding": dataclasses.asdict(sampling),
        "departures": _departures(protocol, sampling),
        "seed": seed,
    }


def _rules(protocol: EpisodeProtocol, tasks: Sequence[Task]) -> dict[str, Any]:
    """The parts of a protocol that must be equal before two scores are compared."""
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
    """Settings of decoding in which a run is not its protocol, with both values."""
    if protocol.sampling is None:
        return {}
    theirs, ours = dataclasses.asdict(protocol.sampling), dataclasses.asdict(sampling)
    return {
        name: {"protocol": theirs[name], "here": value}
        for name, value in ours.items()
        if value != theirs[name]
    }
