"""The stage `branch`, which resumes episodes from the turns that the explorer chooses."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from shlex import quote
from typing import cast

from perturn.config.compatibility import explorer_name, providers
from perturn.config.recipe import Recipe
from perturn.config.stages import Stage, policy_of
from perturn.data.file_seals import done_stages, read_manifest, refuse_damage
from perturn.data.forks import Forks
from perturn.data.origins import best_by_task
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_records, read_trajectories, write_records
from perturn.errors import RunError, check_fit
from perturn.explore import Explorer
from perturn.explore.protocol import ExploreInputs, jobs_of
from perturn.needs import Distance
from perturn.run.protocol_rules import make_protocol
from perturn.run.served_policy import require_weights
from perturn.run.session import Session
from perturn.run.stages.measure_distance import measured
from perturn.run.task_lists import dealt
from perturn.table import locate
from perturn.types import Task, Trajectory, came_elsewhere, failed, succeeded

_logger = logging.getLogger(__name__)


def explorer_of(recipe: Recipe) -> Explorer:
    """Return the explorer of a recipe, which must have one."""
    assert recipe.explore is not None
    return cast(Explorer, recipe.explore)


def check_explorer(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """Reject an explorer that resumes nothing or repeats episodes, or needs weights that only a server holds.

    Args:
        recipe: Recipe with an explorer.
        tasks: Tasks that are explored.
    """
    explorer, name = explorer_of(recipe), explorer_name(recipe)
    if explorer.traits.reads_policy:
        require_weights(
            recipe, f"explore.name={name} reads the weights of the exploring policy", "another explorer"
        )
    if explorer.rounds and not explorer.sampling.temperature and not explorer.traits.expert:
        explorers = {policy_of(recipe, iteration) for iteration in range(recipe.iterations)}
        policy = explorer.traits.policy
        others_play = explorer.rounds == 1 and policy is not None and explorers != {policy}
        must = f"be > 0 for explore.name={name}: an episode that is resumed at 0 is the same episode again"
        remedy = "Set it, such as to 1.0."
        check_fit(others_play, "explore.sampling.temperature", must, explorer.sampling.temperature, remedy)
    if tasks:
        longest = max(map(make_protocol(recipe.protocol).limit, tasks))
        explorer.check(longest, explorer.per_iteration or len(tasks))


def branch(session: Session, stage: Stage) -> None:
    """Let the stage's policy resume episodes at the turns that the explorer chooses."""
    run, explorer = session.run, explorer_of(session.recipe)
    file = run.paths.trajectories(stage.name)
    chosen = (run.paths.forks(stage.mark),) if explorer.traits.reads_policy else ()
    with run.stage(stage.name, file, *chosen) as counts:
        explored = list(read_trajectories(run.paths.trajectories(f"explore{stage.mark}")))
        counts |= _play_rounds(session, stage, explored)
        counts["played_by"] = stage.policy
        counts |= not_come_back(stage.name, read_trajectories(file))


def _play_rounds(session: Session, stage: Stage, explored: Sequence[Trajectory]) -> dict[str, float]:
    """Play the rounds after the rollouts, and return their counts."""
    recipe, explorer = session.recipe, explorer_of(session.recipe)
    file, counts = session.run.paths.trajectories(stage.name), dict[str, float]()
    begun = played_on(session, explored)
    sense = next((need.sense for need in explorer.needs if isinstance(need, Distance)), None)
    inputs = ExploreInputs(
        recipe.seed,
        stage.iteration,
        dealt(session.task_lists.tasks["explore"], recipe.seed, stage.iteration, explorer.per_iteration),
        explored=sorted((one for one in explored if not failed(one)), key=lambda one: one.key),
        begun=begun if sense is None else measured(recipe, begun, sense),
    )
    inputs = replace(inputs, chosen=_chosen(session, stage, inputs))
    for number in range(1, explorer.rounds + 1):
        inputs = replace(inputs, played=list(read_trajectories(file)) if file.exists() else ())
        jobs = jobs_of(explorer, inputs, number)
        what = "branches" if explorer.rounds == 1 else f"round {number} of {explorer.rounds}"
        counts = dict(session.play(file, jobs, stage.policy, explorer.sampling, explorer.concurrency, what))
        if number == explorer.rounds:
            counts |= explorer.counts(inputs, jobs, list(read_trajectories(file)))
    return counts


def _chosen(session: Session, stage: Stage, inputs: ExploreInputs) -> list[Forks]:
    """Return the branching turns of the explored episodes.

    If a policy's weights are needed to choose the turns, the turns are stored before any branch is played. So a stopped
    stage resumes with the same turns.
    """
    explorer, file = explorer_of(session.recipe), session.run.paths.forks(stage.mark)
    if not explorer.traits.reads_policy:
        return explorer.choose(inputs)
    if file.is_file():
        found = list(read_records(file, Forks))
        if [each.key for each in found] == [one.key for one in inputs.explored]:
            return found
    read = locate("perturn.run.stages.quantity_source:read_needs")(
        session, stage, inputs.explored, explorer.needs
    )
    write_records(file, explorer.choose(replace(inputs, read=read)))
    return list(read_records(file, Forks))


def played_on(session: Session, explored: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the explored episodes that the explorer resumes, or expert episodes of these tasks, sorted by key."""
    explorer = explorer_of(session.recipe)
    experts = walked(session, {one.task.id for one in explored}) if explorer.traits.expert else []
    return sorted(explorer.begun(explored, experts), key=lambda one: one.key)


def walked(session: Session, tasks: Container[str]) -> list[Trajectory]:
    """Return the expert's best episode of each given task that the expert solved."""
    stored = read_trajectories(session.run.paths.trajectories("expert"))
    return list(best_by_task(one for one in stored if succeeded(one) and one.task.id in tasks).values())


def stored_branches(paths: RunPaths, recipe: Recipe, mark: str) -> list[Trajectory]:
    """Return the stored branches of an iteration.

    Raises:
        RunError: If the run makes no branches, or their file is unfinished or damaged.
    """
    file = paths.trajectories(f"branch{mark}")
    if recipe.explore is None or not recipe.explore.rounds:
        raise RunError(
            f"the credit reads episodes that were resumed at turns of explored ones, and {file} is not there; explore "
            f"with explore.name={' or '.join(providers('branches'))}."
        )
    manifest = read_manifest(paths.folder)
    if f"branch{mark}" not in done_stages(manifest):
        raise RunError(f"{file} is not finished; run: perturn run {quote(str(paths.folder))}")
    seal = manifest["files"].get(paths.name(file))
    refuse_damage(paths.folder, {paths.name(file): seal} if seal else {})
    return list(read_trajectories(file))


def not_come_back(stage: str, episodes: Iterable[Trajectory]) -> dict[str, int]:
    """Return the number of branches that FAILED because the environment did not return to its state; log a warning."""
    played_on = [one for one in episodes if one.origin is not None]
    count = sum(map(came_elsewhere, played_on))
    if count:
        _logger.warning(
            "%s: the world did not come back to where %d of %d episodes were to go on; they FAILED, and nothing reads "
            "them.",
            stage,
            count,
            len(played_on),
        )
    return {"not_come_back": count}
