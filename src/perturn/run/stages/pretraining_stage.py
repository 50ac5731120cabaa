"""Training episodes for a model trained from scratch: expert, noisy-expert and random play."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from perturn.config.recipe import Recipe
from perturn.config.sections import Base
from perturn.config.stages import Stage
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.envs.abilities import check_abilities
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import Episode, Job, episode, play_alone
from perturn.episodes.replay import play_script
from perturn.episodes.seeds import make_jobs
from perturn.episodes.world_threads import Hear
from perturn.errors import EngineFailure, RunError
from perturn.faults import closing_world
from perturn.run.protocol_rules import make_protocol
from perturn.run.session import Session, WorldMaker, world_maker
from perturn.run.stages.collect_stage import AT_ONCE
from perturn.types import Action, Environment, EpisodeProtocol, Task, Trajectory, succeeded


def show_lessons(session: Session, stage: Stage) -> None:
    """Record expert, noisy-expert and random episodes for the pretraining of the base."""
    run, recipe = session.run, session.recipe
    assert recipe.base is not None
    file = run.paths.trajectories(stage.name)
    jobs = lessons(recipe.base, session.task_lists.tasks["base"])
    start = partial(_shown, settings=recipe.base, protocol=session.protocol)

    def played(missing: Sequence[Job], make: WorldMaker, at_once: int, hear: Hear) -> Iterator[Trajectory]:
        return play_alone(missing, start, make, concurrency=at_once, retries=recipe.worlds.retries, hear=hear)

    with run.stage(stage.name, file) as counts:
        counts |= session.record(file, jobs, played, AT_ONCE, "lessons")


def lessons(settings: Base, tasks: Sequence[Task]) -> list[Job]:
    """Return the jobs to play: expert and noisy-expert episodes of each task, and random episodes of some tasks."""
    last = settings.clumsy + 1
    return [
        *make_jobs(tasks, settings.seed, last),
        *(
            job
            for job in make_jobs(tasks[:: settings.aimless], settings.seed, last + 1)
            if job.sample == last
        ),
    ]


def base_episodes(run: Run) -> list[Trajectory]:
    """Return the training episodes of a base: successful expert and noisy-expert episodes, sorted by sample and task.

    Raises:
        RunError: If no episode is successful.
    """
    assert run.recipe.base is not None
    file, last = run.paths.trajectories("lessons"), run.recipe.base.clumsy + 1
    found = [one for one in read_trajectories(file) if one.sample < last and succeeded(one)]
    if not found:
        raise RunError(f"{file} holds no successful episode to teach; raise protocol.max_turns.")
    return sorted(found, key=lambda one: (one.sample, one.task.id))


def heard(run: Run) -> set[str]:
    """Return all texts for the tokenizer: texts of all recorded episodes, and the reminder after a malformed action."""
    texts = {FORMATS[make_protocol(run.recipe.protocol).format].reminder}
    for one in read_trajectories(run.paths.trajectories("lessons")):
        texts.update(str(message["content"]) for message in one.messages)
    return texts


def check_teacher(recipe: Recipe) -> None:
    """Reject an environment that has no expert, noisy expert or random player."""
    if recipe.base is None:
        return
    with closing_world(world_maker(recipe)()) as env:
        check_abilities(
            env,
            *("expert", "clumsy", "aimless"),
            reader="base needs an expert who also errs",
            otherwise="leave base out and name a model",
        )


def _shown(env: Environment, job: Job, settings: Base, protocol: EpisodeProtocol) -> Episode:
    """Play an episode for pretraining, which needs no engine."""
    yield from ()
    write = FORMATS[protocol.format].write
    steps = episode(env, job, protocol=protocol, policy=_player(job, settings))
    script = [Action(write("", command)) for command in _script(env, job, settings, protocol)]
    return play_script(steps, script, EngineFailure(f"the lesson ended after {len(script)} actions."))


def _player(job: Job, settings: Base) -> str:
    if job.sample == 0:
        return "expert"
    return "clumsy" if job.sample <= settings.clumsy else "aimless"


def _script(env: Any, job: Job, settings: Base, protocol: EpisodeProtocol) -> Sequence[str]:
    """Return the commands of an episode for pretraining."""
    player = _player(job, settings)
    if player == "expert":
        return list(env.expert(job.task))
    if player == "clumsy":
        return list(env.clumsy(job.task, job.seed))
    return list(env.aimless(job.task, job.seed, protocol.limit(job.task)))
