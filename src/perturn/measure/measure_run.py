"""Implement `perturn measure`: the value of each turn of a run, and the agreement of each credit with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from perturn.config.recipe import Recipe
from perturn.config.stages import Stage
from perturn.data.file_seals import refuse_damage, sealed_digests
from perturn.data.run_files import read_note
from perturn.data.run_folder import Run, resolve_recipe, run_folder
from perturn.data.run_paths import OPTIMIZER, RunPaths
from perturn.data.store import read_trajectories
from perturn.display.progress_bars import at_work, track
from perturn.errors import RunError, check_fit, required
from perturn.faults import closing_world
from perturn.io.atomic_write import write_whole
from perturn.measure.advantages import FEWEST, Measured, bounds_of, measure, returns_of
from perturn.measure.conclusions import sentences, unscored
from perturn.measure.credit_scores import FEWEST_TASKS, SCORES, by_third, has_few_tasks, scores_of
from perturn.measure.forecast import Forecast, forecast
from perturn.measure.gradients import ACROSS, ProjectedGradients, figures_of
from perturn.measure.play_points import play_points, rules
from perturn.measure.points import Continuation, Plan, choose, plan, read_continuations
from perturn.measure.projected_gradients import project_gradients
from perturn.measure.weigh import Weighed, refuse_unknown, weigh
from perturn.measure.worlds import WorldCheck, check_world
from perturn.run.protocol_rules import ruled
from perturn.run.recorded_inputs import note_inputs, refuse_changed
from perturn.run.served_policy import engine_settings, policy_path
from perturn.run.session import Session, world_maker
from perturn.run.stages.credit_stage import explored_stages
from perturn.run.stages.quantity_source import open_policy
from perturn.stats import Estimate
from perturn.types import Trajectory, failed

_logger = logging.getLogger(__name__)

MEASURED = "measured advantage"
"""Name under which the measured advantage itself is listed as a credit."""
WITHHELD = {"cosine": "both gradients would have the same noise, which pulls the cosine above 1"}
"""Figures that are not computed for the measured advantage as a credit, with the reason."""


@dataclass(frozen=True)
class Wanted:
    """Choice of the credits, episodes and continuations of a measurement."""

    credits: Sequence[str] = ("all",)
    """Names of credits, or MODULE:CLASS. With `all`, every credit that can be computed for the run's episodes is
    used."""
    episodes: int = 100
    continuations: int = 8
    iteration: int | None = None
    """Iteration whose episodes are measured. If None, it is the last iteration whose policy exists."""
    width: float = 0.1
    """Half-width of an advantage's interval, in units of reward, for which `--dry-run` computes the continuations."""
    gradients: bool = True
    """Whether gradients are compared, if the policy can be loaded."""


def measure_run(source: Path, wanted: Wanted) -> dict[str, Any]:
    """Measure a run, and write the results to the run folder.

    Args:
        source: Folder of a run, or the recipe file of an existing run.
        wanted: What to measure.

    Raises:
        PerturnError: If the run has no episodes that can be measured.
    """
    with _opened(source) as run, Session(run) as session:
        note_inputs(run)
        recipe = run.recipe
        stage, explored, chosen = _episodes(run, wanted)
        _note_measured(run, stage)
        world, planned = _planned(session, stage, explored, chosen)
        weighed, left_out = weigh(run.paths, recipe, stage, wanted.credits, explored)  # its errors come first
        assert recipe.explore is not None
        sampling, concurrency = recipe.explore.sampling, recipe.explore.concurrency
        file = run.paths.continuations(stage.mark)
        played = play_points(
            session, planned, file, stage.policy, sampling, wanted.continuations, concurrency
        )
        returns = returns_of(played)
        turns = measure(planned, returns, recipe.seed)
        if not len(turns.task):
            raise RunError(_unmeasured(played))
        session.release()
        gradients = _gradients(run.paths, recipe, stage, chosen, turns) if wanted.gradients else None
        found = {
            "iteration": stage.iteration,
            "policy": stage.policy,
            "environment": chosen[0].environment,
            "continuations": wanted.continuations,
            "world": asdict(world),
            "explored": len(explored),
            "explored_failed": sum(map(failed, explored)),
            **_counts(planned, played, turns),
            "bounds": list(bounds_of(returns.values()) or ()),
            "gradients": None if gradients is None else gradients.shape[1],
            "credits": _rows(turns, weighed, chosen, gradients, played),
            "left_out": left_out,
            "few_tasks": has_few_tasks(turns),
        }
        _conclude(found)
        found["by_episode"] = _by_episode(chosen, turns, weighed)
        write_whole(run.paths.measured(stage.mark), json.dumps(found) + "\n")
    return found


def _conclude(found: dict[str, Any]) -> None:
    """Add the sentences on the credits. With few tasks there are none, since intervals are then too narrow."""
    rows = found["credits"]
    found["sentences"] = [
        each
        for name, row in rows.items()
        for each in sentences(name, row, found["environment"])
        if not found["few_tasks"]
    ]
    found["unscored"] = unscored(rows.values(), SCORES)
    if found["gradients"] is not None and found["few_tasks"]:
        _logger.warning(
            "%s compare gradients of different tasks, and need at least %d tasks; explore more tasks, or measure "
            "more episodes.",
            ", ".join(ACROSS),
            FEWEST_TASKS,
        )


def forecast_run(source: Path, wanted: Wanted) -> Forecast:
    """Return how many continuations an interval of the wanted width needs, without playing any.

    Args:
        source: Folder of a run, or the recipe file of an existing run.
        wanted: What to measure.
    """
    with _opened(source) as run, Session(run) as session:
        stage, explored, chosen = _episodes(run, wanted)
        world, planned = _planned(session, stage, explored, chosen)
        _inputs(run, stage)
        stored = read_continuations(run.paths.continuations(stage.mark))
        done = [one for one in stored if one.outcome != "failed" or one.tries > 1]
        return forecast(world, planned, explored, done, wanted.continuations, wanted.width)


def _opened(source: Path) -> Run:
    """Open an existing run.

    Raises:
        RunError: If the recipe file has no run yet, or an input of the run has changed. No folder is created.
    """
    recipe = resolve_recipe(source)
    if not RunPaths(run_folder(recipe)).is_run:
        raise RunError(f"{source} has explored nothing yet; run: perturn collect {quote(str(source))}")
    recipe = ruled(recipe)
    refuse_changed(recipe, "measure")
    return Run(recipe)


def _episodes(run: Run, wanted: Wanted) -> tuple[Stage, list[Trajectory], list[Trajectory]]:
    """Return the measured exploration stage, all its episodes, and the episodes to continue.

    Raises:
        PerturnError: If the run has no episode that can be continued.
    """
    recipe, paths = run.recipe, run.paths
    _check_continued(recipe, wanted)
    refuse_unknown(recipe, wanted.credits)
    stage = _stage(run, wanted.iteration)
    explored = list(read_trajectories(paths.trajectories(stage.name)))
    chosen = choose(explored, wanted.episodes, recipe.seed)
    if not chosen:
        raise RunError(
            f"{paths.trajectories(stage.name)} has no episode that did not FAIL; look at their errors."
        )
    return stage, explored, chosen


def _note_measured(run: Run, stage: Stage) -> None:
    """Record the digests of the episodes and of the policy, from which the files of this measurement are made."""
    write_whole(run.paths.measured_inputs(stage.mark), json.dumps(_inputs(run, stage), indent=1) + "\n")


def _inputs(run: Run, stage: Stage) -> dict[str, str]:
    """Return the digests of the episodes and of the policy. Files of an earlier call are reused only if they are equal.

    The optimizer is not among them, since a run deletes it when it goes on.

    Raises:
        RunError: If the episodes or the policy are damaged, or have been made again since the earlier call.
    """
    paths = run.paths
    names = {paths.name(each) for each in (paths.trajectories(stage.name), paths.checkpoint(stage.policy))}
    noted = read_note(paths.measured_inputs(stage.mark), dict[str, str])
    now, before = (
        {name: digest for name, digest in (each or {}).items() if Path(name).name not in OPTIMIZER}
        for each in (sealed_digests(run.manifest, names), noted)
    )
    if noted is not None and before != now:
        made = (
            paths.measured_inputs(stage.mark),
            paths.continuations(stage.mark),
            paths.gradients(stage.mark),
        )
        raise RunError(
            "there are continuations of other episodes or of another policy: they were made again since then. "
            f"To measure anew, remove {', '.join(map(str, made))}."
        )
    refuse_damage(run.folder, {file: run.manifest["files"][file] for file in now})
    return now


def _check_continued(recipe: Recipe, wanted: Wanted) -> None:
    """Raise an error if the episodes of a run cannot be continued as wanted."""
    reader, remedy = "perturn measure continues explored episodes in it", "give a run whose recipe has it"
    explore = required(recipe.explore, "explore", "perturn measure continues its episodes", remedy)
    required(recipe.environment, "environment", reader, remedy)
    must = "be null, since continuations are not rated by a judge"
    remedy = "Measure a run with the rewards of its environment."
    check_fit(recipe.judge is None, "reward.judge", must, recipe.judge, remedy)
    temperature = explore.sampling.temperature
    must = "be > 0, since all continuations are equal at 0"
    check_fit(
        temperature, "explore.sampling.temperature", must, temperature, "Explore with 1.0, for example."
    )
    must, number = f"be >= {FEWEST}, two for each half", wanted.continuations
    check_fit(number >= FEWEST, "--continuations", must, number)
    check_fit(wanted.episodes >= 1, "--episodes", "be >= 1", wanted.episodes)
    check_fit(wanted.width > 0, "--width", "be > 0", wanted.width)


def _stage(run: Run, iteration: int | None) -> Stage:
    """Return an iteration's exploration stage; None: the last exploration stage whose policy still exists."""
    found = explored_stages(run.paths, run.recipe)
    if iteration is not None:
        found = [stage for stage in found if stage.iteration == iteration]
        if not found:
            raise RunError(f"{run.folder} has not explored iteration {iteration}; leave --iteration out.")
        policy_path(run, found[0].policy)
        return found[0]
    missing: RunError | None = None
    for stage in reversed(found):
        try:
            policy_path(run, stage.policy)
            return stage
        except RunError as error:
            missing = missing or error
    assert missing is not None
    raise missing


def _planned(
    session: Session, stage: Stage, explored: Sequence[Trajectory], chosen: Sequence[Trajectory]
) -> tuple[WorldCheck, Plan]:
    """Classify the environment by its recorded and replayed answers, and return the result with the points."""
    with at_work("playing episodes again"), closing_world(world_maker(session.recipe)()) as env:
        has_user = session.recipe.user is not None
        world = check_world(env, chosen, rules(session, stage.policy), explored, has_user=has_user)
    return world, plan(chosen, world.kind)


def _counts(planned: Plan, played: Sequence[Continuation], turns: Measured) -> dict[str, Any]:
    outcomes = [one.outcome for one in played]
    return {
        "episodes": len(planned.episodes),
        "tasks": len({one.task.id for one in planned.episodes}),
        "turns": sum(len(one.turns) for one in planned.episodes),
        "measured": len(turns.task),
        "points": len(planned.points),
        "played": len(played),
        "failed": outcomes.count("failed"),
        "came_elsewhere": outcomes.count("elsewhere"),
        "turns_played": sum(one.turns for one in played),
    }


def _unmeasured(played: Sequence[Continuation]) -> str:
    """Return why no turn was measured, and what to do."""
    outcomes = [one.outcome for one in played]
    return (
        f"no turn has {FEWEST} continuations that count: of {len(played)} continuations, {outcomes.count('failed')} "
        f"failed with an error of the environment or the engine, and {outcomes.count('elsewhere')} did not come back "
        "to their turn. The same command plays failed continuations once more; `perturn check-env` says why an "
        "environment does not come back."
    )


def _gradients(
    paths: RunPaths, recipe: Recipe, stage: Stage, chosen: Sequence[Trajectory], turns: Measured
) -> ProjectedGradients | None:
    """Return the gradients of the measured turns; None if the policy cannot be loaded on this machine."""
    if not engine_settings(recipe).traits.serves_checkpoints:
        return None
    reader = open_policy(paths, recipe, stage.policy)
    tracked = partial(track, what="gradients of turns", unit="episodes")
    found = project_gradients(reader.model, reader.renderer, chosen, paths.gradients(stage.mark), tracked)
    return np.stack([found[e][t] for e, t in zip(turns.episode, turns.position, strict=True)])


def _rows(
    turns: Measured,
    weighed: Mapping[str, Weighed],
    chosen: Sequence[Trajectory],
    gradients: ProjectedGradients | None,
    played: Sequence[Continuation],
) -> dict[str, Any]:
    """Return the scores of each credit, and of the measured advantage as a credit."""
    found = {}
    figures = None if gradients is None else figures_of(turns, gradients)
    for name, one in track(weighed.items(), "scores", "credits"):
        credit = np.array([one.weights[chosen[e].key][t] for e, t in _turns_of(turns)])
        row: dict[str, Any] = {"settings": dict(one.section), "by_outcome": one.by_outcome, "cost": one.cost}
        row |= _plain(scores_of(turns, credit))
        row["by_third"] = {third: _plain(own) for third, own in by_third(turns, credit).items()}
        if figures is not None:
            row |= _at_cost(_plain(figures(credit)), one.cost)
        found[name] = row
    if figures is not None:
        length = sum(len(one.turns) for one in chosen)
        cost = 1 + sum(one.turns for one in played) / length
        own = _at_cost(_plain(figures(turns.advantage)), cost)
        own |= dict.fromkeys(WITHHELD)
        found[MEASURED] = {
            "settings": {},
            "by_outcome": False,
            "cost": cost,
            "by_third": {},
            "withheld": WITHHELD,
        }
        found[MEASURED] |= own
    return found


def _turns_of(turns: Measured) -> list[tuple[int, int]]:
    """Return the episode and the position of each turn."""
    return list(zip(turns.episode.tolist(), turns.position.tolist(), strict=True))


def _plain(estimates: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """Return estimates as [mean, low, high], with None for an infinite or undefined end."""
    return {
        name: None if one is None else [_finite(each) for each in (one.mean, one.low, one.high)]
        for name, one in estimates.items()
    }


def _at_cost(figures: dict[str, Any], cost: float) -> dict[str, Any]:
    """Add the signal-to-noise ratio of as many episodes as cost a thousand passes. The ratio is linear in episodes."""
    ends = figures.get("signal_to_noise")
    divided = None if ends is None else [None if each is None else round(each / cost, 6) for each in ends]
    return figures | {"signal_at_cost": divided}


def _finite(value: float) -> float | None:
    return round(value, 6) if isfinite(value) else None


def _by_episode(
    chosen: Sequence[Trajectory], turns: Measured, weighed: Mapping[str, Weighed]
) -> list[dict[str, Any]]:
    """Return each episode with the measured advantages and credits of its turns; None where not measured."""
    at = {turn_of: index for index, turn_of in enumerate(_turns_of(turns))}
    found = []
    for number, one in enumerate(chosen):
        own = [at.get((number, turn)) for turn in range(len(one.turns))]
        columns = {"advantage": turns.advantage, "low": turns.low, "high": turns.high, "value": turns.value}
        found.append(
            {
                "task": one.task.id,
                "sample": one.sample,
                "success": one.success,
                "actions": [turn.action.text for turn in one.turns],
                "calls": [list(turn.action.tool_calls) for turn in one.turns],
                **{
                    name: [None if index is None else round(float(column[index]), 6) for index in own]
                    for name, column in columns.items()
                },
                "credits": {
                    name: [round(float(each), 6) for each in its.weights[one.key]]
                    for name, its in weighed.items()
                },
            }
        )
    return found
