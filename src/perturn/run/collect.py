"""Collect trajectories: the expert's, verified by playing them or recorded by others, and the SFT policy's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.envs.load import make_environment
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Episode, Job, episode, play_again
from perturn.episodes.prompts import system_prompt
from perturn.errors import ConfigError, EngineFailure, RunError
from perturn.faults import close_world
from perturn.run.progress import bar
from perturn.run.session import (
    choose_tasks,
    judge,
    make_jobs,
    make_protocol,
    outcomes,
    record,
    sft_tasks,
    world_maker,
)
from perturn.types import Action, EpisodeProtocol, Task, Trajectory


def collect_expert(run: Run) -> None:
    """Play the expert on every task that is taught or explored, and record what happens.

    Episodes that failed before are played again.

    Raises:
        RunError: If the environment has no expert and no expert trajectories are there.
    """
    recipe = run.recipe
    protocol = make_protocol(recipe.protocol)
    file = run.trajectories("expert")
    env: Any = world_maker(recipe)()
    try:
        if not hasattr(env, "expert") and run.trajectories("expert").is_file():
            with run.stage("expert", file) as counts:
                counts |= outcomes(read_trajectories(run.trajectories("expert")))
            return
        if not hasattr(env, "expert"):
            raise RunError(
                f"environment {recipe.environment['name']!r} has no expert; bring episodes of others with perturn "
                f"import-expert, or record them in {run.trajectories('expert')} yourself "
                "(docs: perturn.data.store.TrajectoryStore)."
            )
        panels = [sft_tasks(recipe), recipe.explore.tasks]
        tasks = {task.id: task for panel in panels for task in choose_tasks(env, panel)}
        with run.stage("expert", file) as counts, TrajectoryStore(file) as store:
            failures = judge(run, store, len(tasks), again=True)
            done = store.keys()
            run.expect(store.path, len(tasks), len(done))
            with bar("expert episodes", total=len(tasks), done=len(done)) as shown:
                for job in make_jobs(tasks.values(), recipe.seed):
                    if (job.task.id, job.sample) not in done:
                        show = partial(demonstrate, env, job, protocol)
                        played = play_again(show, recipe.worlds.retries)
                        store.append(played)
                        shown.advance()
                        failures.add([played]).refuse("expert episodes")
            counts |= outcomes(store.read())
    finally:
        close_world(env)


def import_expert(run: Run, file: Path) -> dict[str, int]:
    """Bring episodes that others recorded into a run, as those of its expert.

    Kept are those on tasks that are taught or explored, under the prompt of the run's protocol. What the run holds
    already is left alone, so a second call adds nothing.

    Args:
        run: The run. Its environment must read such files (`read_experts`), as hotpotqa does.
        file: What was recorded.

    Returns:
        How many were `imported`, and how many were there `before`.

    Raises:
        ConfigError: If the environment reads no such files, or none is on a task of the run.
    """
    recipe = run.recipe
    protocol = make_protocol(recipe.protocol)
    env: Any = make_environment(recipe.environment)
    try:
        if not hasattr(env, "read_experts"):
            raise ConfigError(f"environment {recipe.environment['name']!r} reads no episodes of others.")
        panels = [sft_tasks(recipe), recipe.explore.tasks]
        tasks = {task.id: task for panel in panels for task in choose_tasks(env, panel)}
        rules: dict[str, Any] = {
            "protocol": f"{protocol.name}-{protocol.format}",
            "prompt": system_prompt(protocol),
            "history": protocol.history,
        }
        write = FORMATS[protocol.format].write
        counts = Counter(imported=0, before=0)
        with TrajectoryStore(run.trajectories("expert")) as store:
            held = store.keys()
            for found in env.read_experts(file, list(tasks.values()), write):
                new = found.key not in held
                counts["imported" if new else "before"] += 1
                if new and run.is_done("expert"):
                    raise RunError(
                        f"{run.trajectories('expert')} is finished, so nothing can be added; import into another run, "
                        "name=..., or remove that file and what was made from it."
                    )
                if new:
                    store.append(replace(found, **rules))
    finally:
        close_world(env)
    if not counts.total():
        raise ConfigError(
            f"{file}: no episode is on one of the {len(tasks)} tasks of sft.tasks and explore.tasks."
        )
    return dict(counts)


def demonstrate(env: Any, job: Job, protocol: EpisodeProtocol) -> Trajectory:
    """Play the expert's actions on one task; an expert that raises has failed.

    Args:
        env: A world that is also an `Expert`.
        job: What to play.
        protocol: Rules to play by. In the react format, an expert without thoughts of its own (see `Demonstrator`) gets
            a template for them.
    """
    write = FORMATS[protocol.format].write
    steps = episode(env, job, protocol=protocol, policy="expert")
    try:
        script = [Action(write(thought, action)) for thought, action in _demonstration(env, job.task)]
    except (RunError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  environments are code of others; a bad episode is data
        return play_script(steps, [], error)
    failure = EngineFailure(f"the task was not finished after the expert's {len(script)} actions.")
    return play_script(steps, script, failure)


def _demonstration(env: Any, task: Task) -> Sequence[tuple[str, str]]:
    """(thought, action) a turn of the expert."""
    if hasattr(env, "demonstration"):
        said: Sequence[tuple[str, str]] = env.demonstration(task)
        return said
    return [(f"The next thing to do is: {action}.", action) for action in env.expert(task)]


def play_script(steps: Episode, script: Sequence[Action], failure: BaseException) -> Trajectory:
    """Play given actions; an episode that outlasts them is marked FAILED with the failure."""
    try:
        next(steps)
        for action in script:
            steps.send(action)
        steps.throw(failure)
    except StopIteration as end:
        trajectory: Trajectory = end.value
        return trajectory
    raise AssertionError("an episode ends when its engine fails")


def collect_explore(run: Run, policy: str = "sft") -> None:
    """Let a policy play the tasks it will be corrected on, or on which it is the teacher.

    Args:
        run: The run.
        policy: `sft`, or `base` where the engine serves no other.
    """
    settings = run.recipe.explore
    env = world_maker(run.recipe)()
    try:
        jobs = make_jobs(choose_tasks(env, settings.tasks), run.recipe.seed, settings.samples)
    finally:
        close_world(env)
    with run.stage("explore", run.trajectories("explore")) as counts:
        counts |= record(
            run,
            run.trajectories("explore"),
            jobs,
            policy,
            settings.sampling,
            settings.concurrency,
            "exploration episodes",
        )
