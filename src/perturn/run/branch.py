"""Play explored episodes, or the expert's, on from some turns, and say what the turns were worth by how that ends."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence

from perturn.data.pairs import best_by_task
from perturn.data.paths import RunPaths
from perturn.data.seals import read_manifest, refuse_damage
from perturn.data.store import read_trajectories
from perturn.episodes.play import Job
from perturn.errors import ConfigError, RunError
from perturn.remaining import wrong_turns
from perturn.run.measure import measured
from perturn.run.panels import seed_of
from perturn.run.session import Session, make_protocol
from perturn.settings.branch import Branch
from perturn.settings.recipe import Recipe
from perturn.settings.stages import Stage, policy_of
from perturn.table import locate
from perturn.types import Task, Trajectory, came_elsewhere, failed, succeeded

_logger = logging.getLogger(__name__)


def check_branch(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """Refuse branches of which none would be played, or which would be one and the same episode.

    Args:
        recipe: With a section `branch`.
        tasks: That are explored.

    Raises:
        ConfigError: Saying what to set.
    """
    assert recipe.branch is not None
    assert recipe.explore is not None
    protocol = make_protocol(recipe.protocol)
    every = recipe.branch.every if recipe.branch.at == "every" else 1
    longest = max(map(protocol.limit, tasks), default=0)
    if tasks and recipe.branch.search is None and recipe.branch.at != "wrong" and every >= longest:
        remedy = (
            f"take less than {longest}" if longest > 1 else "let them take two or more (protocol.max_turns)"
        )
        raise ConfigError(
            f"branch.{'every is' if recipe.branch.at == 'every' else 'at begins at turn'} {every}, and no episode has "
            f"more than {longest} turns, so that none would be played on; {remedy}."
        )
    if tasks and recipe.branch.window is not None:
        _check_window(recipe.branch, longest - (every if recipe.branch.at != "wrong" else 0))
    locate("perturn.run.forks:check_forks")(recipe, recipe.explore.per_iteration or len(tasks))
    if not recipe.explore.sampling.temperature:
        _check_greedy(recipe, recipe.branch)


def _check_window(settings: Branch, longest: int) -> None:
    """Refuse a window that cuts no branch, of which none has more than `longest` turns.

    Raises:
        ConfigError: Saying what to set.
    """
    assert settings.window is not None
    if settings.window >= longest:
        raise ConfigError(
            f"branch.window is {settings.window}, and no branch has more than {longest} turns, so that none would be "
            "cut; take less, or leave it out."
        )


def _check_greedy(recipe: Recipe, settings: Branch) -> None:
    """Refuse branches that are alike, or the explored episode again, where nothing is left to chance.

    Raises:
        ConfigError: Saying what to set.
    """
    explorers = {policy_of(recipe, iteration) for iteration in range(recipe.iterations)}
    alike = settings.search is not None or settings.policy is None or explorers == {settings.policy}
    if settings.of != "expert" and alike:
        raise ConfigError(
            "branch plays episodes on with the sampling of explore, which at temperature 0 is the same episode again; "
            "set explore.sampling.temperature, such as 1.0."
        )
    if settings.samples > 1:
        raise ConfigError(
            f"branch.samples is {settings.samples}, and at temperature 0 all branches from a turn are alike; set "
            "branch.samples=1, or explore.sampling.temperature, such as 1.0."
        )


def branch(session: Session, stage: Stage) -> None:
    """Let the stage's policy play explored episodes, or the expert's of their tasks, on from some turns."""
    run, recipe = session.run, session.recipe
    assert recipe.branch is not None
    assert recipe.explore is not None
    begun = list(read_trajectories(run.paths.trajectories(f"explore{stage.mark}")))
    file = run.paths.trajectories(stage.name)
    chosen = (run.paths.forks(stage.mark),) if recipe.branch.reads_policy else ()
    with run.stage(stage.name, file, *chosen) as counts:
        if recipe.branch.search is not None:
            counts |= locate("perturn.run.search:search")(session, stage, begun)
        else:
            counts |= _play_on(session, stage, begun)
        counts["played_by"] = stage.policy
        counts |= not_come_back(stage.name, read_trajectories(file))


def _play_on(session: Session, stage: Stage, begun: Sequence[Trajectory]) -> dict[str, float]:
    """Play explored episodes, or the expert's of their tasks, on from some turns; counts of it."""
    recipe, file = session.recipe, session.run.paths.trajectories(stage.name)
    assert recipe.branch is not None
    assert recipe.explore is not None
    explored, begun = begun, played_on(session, begun)
    if recipe.branch.at == "wrong":
        begun = measured(recipe, begun)
    how, found, turns = recipe.explore, [], None
    if recipe.branch.reads_policy:  # a predictor of outcomes learns from all, whichever are played on
        found = locate("perturn.run.forks:forks_of")(session, stage, explored)
        turns = {each.key: each.turns for each in found}
    jobs = branch_jobs(begun, recipe.branch, recipe.seed, how.samples, stage.iteration, turns)
    counts: dict[str, float] = {}
    counts |= session.play(file, jobs, stage.policy, how.sampling, how.concurrency, "branches")
    if recipe.branch.reads_policy:
        count = locate("perturn.run.forks:fork_counts")
        counts |= count(found, recipe.branch, explored, read_trajectories(file))
    return counts


def played_on(session: Session, explored: Sequence[Trajectory]) -> list[Trajectory]:
    """The episodes of `branch.of` that did not FAIL: explored ones, or the expert's of their tasks."""
    settings = session.recipe.branch
    assert settings is not None
    if settings.of == "expert":
        return walked(session, {one.task.id for one in explored})
    return [one for one in explored if _is_played_on(one, settings)]


def _is_played_on(one: Trajectory, settings: Branch) -> bool:
    """Whether an episode is one of `branch.of`."""
    return not failed(one) and not (settings.of == "failures" and succeeded(one))


def walked(session: Session, tasks: Container[str]) -> list[Trajectory]:
    """The expert's best episode of each of these tasks that he solved."""
    stored = read_trajectories(session.run.paths.trajectories("expert"))
    return list(best_by_task(one for one in stored if succeeded(one) and one.task.id in tasks).values())


def branch_jobs(
    explored: Iterable[Trajectory],
    settings: Branch,
    seed: int,
    samples: int = 1,
    iteration: int = 1,
    turns: Mapping[tuple[str, int], Sequence[int]] | None = None,
) -> list[Job]:
    """Episodes to play on: each begins with the first turns of an explored one.

    Every so many turns: which these are is known when they are reached, whatever comes after, so that an average over
    branches is no guess of how the explored episode ends. FAILED episodes are left alone.

    Args:
        explored: Episodes, or the expert's, in any order.
        settings: From which turns, and how often.
        seed: Of the run.
        samples: Explored episodes of a task, whose numbers the new ones do not take.
        iteration: From 1.
        turns: Which are played on from, by the key of the explored episode; None: every so many, as `settings` says.

    Returns:
        One job an episode, in the order of the keys of `explored`, of turns and of samples; the seed of each depends
        on the run's seed, the task, its own number and the iteration alone.

    Raises:
        DataError: If the first wrong turn is asked for, and the remaining path was not measured.
    """
    jobs = []
    for one in sorted(explored, key=lambda one: one.key):
        if not _is_played_on(one, settings):
            continue
        own = _turns_of(one, settings) if turns is None else turns[one.key]
        for number, kept in enumerate(kept for kept in own for _ in range(settings.samples)):
            sample = one.sample + samples * (1 + number)
            drawn = seed_of(seed, one.task.id, sample, iteration)
            jobs.append(Job(one.task, drawn, sample, one, kept, settings.window))
    return jobs


def _turns_of(one: Trajectory, settings: Branch) -> Sequence[int]:
    """Turns before which an episode is played on."""
    if settings.at == "every":
        return range(settings.every, len(one.turns), settings.every)
    wrong = wrong_turns(one)
    return [wrong.index(True)] if True in wrong else []


def stored_branches(paths: RunPaths, recipe: Recipe, mark: str) -> list[Trajectory]:
    """Episodes of an iteration that were played on from turns of explored ones.

    Raises:
        RunError: If they are not there, not all of them are, or their file is damaged.
    """
    file = paths.trajectories(f"branch{mark}")
    if recipe.branch is None:
        raise RunError(
            f"the credit reads episodes that were played on from turns of explored ones, and {file} is not there; "
            "explore with a section `branch` in the recipe."
        )
    manifest = read_manifest(paths.folder) or {}
    if not manifest.get("stages", {}).get(f"branch{mark}", {}).get("done"):
        raise RunError(f"{file} is not finished; run: perturn run {paths.folder}")
    seal = manifest.get("files", {}).get(paths.name(file))
    refuse_damage(paths.folder, {paths.name(file): seal} if seal else {})
    return list(read_trajectories(file))


def not_come_back(stage: str, episodes: Iterable[Trajectory]) -> dict[str, int]:
    """The count of episodes of a stage that were not played on, since the world did not come back; warns of them."""
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
