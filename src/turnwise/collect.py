"""Collect trajectories: the expert's, verified by playing them, and the SFT policy's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.config import Tasks
from turnwise.errors import EngineFailure, RunError
from turnwise.formats import FORMATS
from turnwise.progress import bar
from turnwise.rollout import Episode, Job, episode
from turnwise.stage import choose_tasks, environment_maker, make_jobs, make_protocol, outcomes, record
from turnwise.store import TrajectoryStore, read_trajectories
from turnwise.types import Action, EpisodeProtocol, Trajectory
from turnwise.workspace import Run


def collect_expert(run: Run) -> None:
    """Play the expert on every task that is taught or explored, and record what happens.

    Raises:
        RunError: If the environment has no expert and no expert trajectories are there.
    """
    recipe = run.recipe
    protocol = make_protocol(recipe.protocol)
    env: Any = environment_maker(recipe.environment)()
    try:
        if not hasattr(env, "expert") and run.trajectories("expert").is_file():
            with run.stage("expert") as counts:
                counts |= outcomes(read_trajectories(run.trajectories("expert")))
            return
        if not hasattr(env, "expert"):
            raise RunError(
                f"environment {recipe.environment['name']!r} has no expert; record expert trajectories in "
                f"{run.trajectories('expert')} yourself (docs: turnwise.store.TrajectoryStore)."
            )
        panels = [recipe.sft.tasks or Tasks(), recipe.explore.tasks]
        tasks = {task.id: task for panel in panels for task in choose_tasks(env, panel)}
        with run.stage("expert") as counts, TrajectoryStore(run.trajectories("expert")) as store:
            done = store.keys()
            with bar("expert episodes", total=len(tasks), done=len(done)) as shown:
                for job in make_jobs(tasks.values(), recipe.seed):
                    if (job.task.id, job.sample) not in done:
                        store.append(demonstrate(env, job, protocol))
                        shown.advance()
            counts |= outcomes(store.read())
    finally:
        env.close()


def demonstrate(env: Any, job: Job, protocol: EpisodeProtocol) -> Trajectory:
    """Play the expert's actions on one task.

    Args:
        env: A world that is also an `Expert`.
        job: What to play.
        protocol: Rules to play by. In the react format the thought is a template, since experts have none.
    """
    write = FORMATS[protocol.format].write
    script = [Action(write(f"The next thing to do is: {action}.", action)) for action in env.expert(job.task)]
    return play_script(episode(env, job, protocol=protocol, policy="expert"), script)


def play_script(steps: Episode, script: Sequence[Action]) -> Trajectory:
    """Play given actions; an episode that outlasts them is marked FAILED."""
    try:
        next(steps)
        for action in script:
            steps.send(action)
        steps.throw(EngineFailure(f"the task was not finished after the expert's {len(script)} actions."))
    except StopIteration as end:
        trajectory: Trajectory = end.value
        return trajectory
    raise AssertionError("an episode ends when its engine fails")


def collect_explore(run: Run) -> None:
    """Let the SFT policy play the tasks it will be corrected on."""
    settings = run.recipe.explore
    env = environment_maker(run.recipe.environment)()
    try:
        jobs = make_jobs(choose_tasks(env, settings.tasks), run.recipe.seed, settings.samples)
    finally:
        env.close()
    with run.stage("explore") as counts:
        counts |= record(
            run,
            run.trajectories("explore"),
            jobs,
            "sft",
            settings.sampling,
            settings.concurrency,
            "exploration episodes",
        )
