"""The stages that collect episodes: expert episodes, played or imported, and explored episodes of a policy."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from perturn.config.recipe import Recipe
from perturn.config.stages import Stage, compares_expert, mark, stages, starts_over
from perturn.data.episode_outcomes import outcomes
from perturn.data.run_folder import Run, run_folder
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore, read_trajectories, write_records
from perturn.envs.abilities import EXPERTS, abilities_of, ability
from perturn.envs.load_environment import make_environment
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import Episode, Job, episode, play_alone
from perturn.episodes.prompts import system_prompt
from perturn.episodes.replay import play_script
from perturn.episodes.seeds import make_jobs
from perturn.episodes.world_threads import Hear
from perturn.errors import ConfigError, DataError, EngineFailure, RunError, check_fit
from perturn.explore.protocol import ExploreInputs, jobs_of
from perturn.faults import closing_world
from perturn.formats.read_rows import is_trajectory, recorded_rows_of, rows_of
from perturn.formats.row_sources import open_source
from perturn.io.read_input import user_path
from perturn.run.protocol_rules import make_protocol
from perturn.run.session import Session, WorldMaker, world_maker
from perturn.run.stages.branch_stage import explorer_of, not_come_back
from perturn.run.task_lists import dealt, look_up
from perturn.types import Action, Environment, EpisodeProtocol, Task, Trajectory, succeeded, unfinished

_logger = logging.getLogger(__name__)

_OURS = {"turns", "messages", "completion", "chosen", "conversations", "conversation", "text"}
"""Keys of rows in the formats of Perturn, TRL and ShareGPT. Each row has at least one of these keys."""
AT_ONCE = 16
"""Number of expert episodes to play at the same time, for a recipe without exploration."""


def show_expert(session: Session, stage: Stage) -> None:
    """Let the expert play every task of SFT and exploration, and record the episodes.

    FAILED episodes of an earlier call are played again, unless a later stage is done or has unfinished files.

    Raises:
        RunError: If the environment has no expert, and no expert episodes are recorded.
    """
    run, recipe = session.run, session.recipe
    file = run.paths.trajectories(stage.name)
    with closing_world(world_maker(recipe)()) as env:
        check_expert(recipe, env)
        has_expert = not abilities_of(env).isdisjoint(EXPERTS)

    def played(missing: Sequence[Job], make: WorldMaker, at_once: int, hear: Hear) -> Iterator[Trajectory]:
        start = partial(shown, protocol=session.protocol, folder=run.paths.teacher)
        return play_alone(missing, start, make, concurrency=at_once, retries=recipe.worlds.retries, hear=hear)

    with run.stage(stage.name, file) as counts:
        if has_expert:
            jobs = make_jobs(session.task_lists.expert, recipe.seed)
            at_once = recipe.explore.concurrency if recipe.explore else AT_ONCE
            counts |= session.record(file, jobs, played, at_once, "expert episodes", again=True)
        else:
            counts |= outcomes(read_trajectories(file))
        if compares_expert(recipe):
            counts |= session.judge(file, "expert episodes")


def check_expert(recipe: Recipe, env: Environment) -> None:
    """Reject a run that needs an expert's episodes, if the environment has no expert and no episodes are recorded.

    Raises:
        RunError: If the expert's episodes cannot be had.
    """
    file = RunPaths(run_folder(recipe)).trajectories("expert")
    brings = recipe.expert is not None and recipe.expert.file is not None
    if brings or file.is_file() or not abilities_of(env).isdisjoint(EXPERTS):
        return
    if any(stage.name == "expert" for stage in stages(recipe)):
        assert recipe.environment is not None
        raise RunError(
            f"environment {recipe.environment['name']!r} has no expert, whose episodes the recipe needs. Name a file "
            "of episodes in expert.file (`perturn play --output` writes such a file), bring episodes with `perturn "
            "import-expert`, or learn online without sft (docs: Learn online)."
        )


def bring_expert(session: Session, stage: Stage) -> None:
    """Import expert episodes from the user's rows: trajectories unchanged, conversations as successes.

    Raises:
        DataError: If a row is malformed or a pair, or there is no row.
    """
    assert session.recipe.expert is not None
    assert session.recipe.expert.file is not None
    source = user_path(session.recipe.expert.file, "expert.file")
    target = session.run.paths.trajectories(stage.name)
    with session.run.stage(stage.name, target) as counts:
        write_records(target, own_episodes(source))
        counts |= outcomes(read_trajectories(target))
        if compares_expert(session.recipe):
            counts |= session.judge(target, "expert episodes")
    _warn_of_failures(source, counts, counts["episodes"] - counts["success"], "training ignores them")


def bring_explored(session: Session, stage: Stage) -> None:
    """Import explored episodes from the user's file, such as rollouts of another trainer.

    Raises:
        DataError: If a row is malformed, two episodes of a task have the same number, or there is no row.
    """
    assert session.recipe.explore is not None
    source = user_path(str(session.recipe.explore.traits.source), "explore.path")
    target = session.run.paths.trajectories(stage.name)
    with session.run.stage(stage.name, target) as counts:
        write_records(target, rows_of(source, Trajectory))
        counts |= outcomes(read_trajectories(target))
        counts |= session.judge(target, "exploration episodes")
    effect = "reports, and rows that read successes, count them as failures; if some are successes, set `success: true`"
    played = counts["episodes"] - counts["failed"]
    _warn_of_failures(source, counts, 0 if counts["success"] else played, effect)


def _warn_of_failures(source: Path, counts: Mapping[str, int], failures: int, effect: str) -> None:
    """Log a warning that episodes of a user's file are no successes, as without the key `success`."""
    if failures:
        said = "%s: episodes that are no successes: %d of %d; %s."
        _logger.warning(said, source, failures, counts["episodes"], effect)


def own_episodes(source: Path) -> Iterator[Trajectory]:
    """Yield the episodes of a user's file: trajectories unchanged, conversations as successes.

    Raises:
        DataError: If a row is malformed or a pair, or there is no row.
    """
    for record, row in recorded_rows_of(source, Trajectory):
        yield row if is_trajectory(record.value) else replace(row, success=True)


def shown(env: Any, job: Job, protocol: EpisodeProtocol, folder: Path | None = None) -> Episode:
    """Play the expert's episode, which needs no engine of the run. Paid answers are kept in `folder`, if given."""
    yield from ()
    if "show" in abilities_of(env):
        played: Trajectory = ability(env, "show")(job, protocol, folder)
        return played
    return demonstrate(env, job, protocol)


def import_expert(run: Run, file: Path) -> dict[str, int]:
    """Import recorded episodes into a run, as the expert's episodes.

    The format is detected from the file's content. It may hold trajectories of Perturn, conversations of TRL, or
    episodes in a format that the environment reads (`read_experts`), as hotpotqa does. Episodes on tasks of SFT or
    exploration are kept. Conversations have no task; all are kept if the run trains on expert episodes. Episodes that
    the run holds already are not changed, so a second call adds nothing.

    Args:
        run: The run.
        file: File of recorded episodes.

    Returns:
        The number of `imported` episodes, and of episodes that the run held `before`. Of all these
        episodes, `no_success` are no successes, so training ignores them, and `cut` ended early. `left_out` rows belong
        to no task of the run. If the environment reads the file, its warning counts such rows instead.

    Raises:
        ConfigError: If the recipe names another file of expert episodes, or the run can use no row.
        DataError: If a row is malformed or a pair, or belongs to another environment.
    """
    recipe = run.recipe
    taken = None if recipe.expert is None else recipe.expert.file
    must = "be null where the expert's episodes are imported from another file"
    check_fit(taken is None, "expert.file", must, taken, "Join the files, or remove it.")
    counts = Counter(imported=0, before=0, left_out=0, no_success=0, cut=0)
    with closing_world(make_environment(recipe.environment or {})) as env:
        tasks = look_up(recipe, env).expert
        reads_own = "read_experts" in abilities_of(env) and not _is_ours(file)
        found = list(
            _theirs(run, file, env, tasks) if reads_own else _ours(run, file, env.name, tasks, counts)
        )
    if not found:
        raise ConfigError(
            f"{file}: no episode is on one of the {len(tasks)} tasks of sft.tasks and explore.tasks, "
            "and conversations are trained on by sft and by rows that start over, such as rows.name=rft, alone."
        )
    _add(run, found, file, counts)
    return dict(counts)


def _is_ours(file: Path) -> bool:
    """Return whether a file holds trajectories or rows in a public format, by the keys of its first object."""
    rows = (record.value for record in open_source(file).read())
    first = next((row for row in rows if isinstance(row, dict)), None)
    return first is None or not _OURS.isdisjoint(first)


def _ours(
    run: Run, file: Path, environment: str, tasks: Sequence[Task], counts: Counter[str]
) -> Iterator[Trajectory]:
    """Yield the file's episodes on the given tasks, and its conversations if the run trains on them. Count the rest."""
    known = {task.id for task in tasks}
    is_taught = run.recipe.sft is not None or starts_over(run.recipe)
    for number, one in enumerate(own_episodes(file), start=1):
        if one.environment not in ("", environment):
            raise DataError(
                f"{file}: row {number}: expected an episode of {environment}, got one of {one.environment}, whose "
                "rewards do not compare. Record it again."
            )
        if one.task.id in known or (is_taught and not one.environment):
            yield one
        else:
            counts["left_out"] += 1


def _theirs(run: Run, file: Path, env: Any, tasks: Sequence[Task]) -> Iterator[Trajectory]:
    """Yield the episodes that the environment reads from the file, with the prompt of the run's protocol."""
    protocol = make_protocol(run.recipe.protocol)
    rules: dict[str, Any] = {
        "protocol": f"{protocol.name}-{protocol.format}",
        "prompt": system_prompt(protocol),
        "history": protocol.history,
    }
    for found in env.read_experts(file, tasks, FORMATS[protocol.format].write):
        yield replace(found, **rules)


def _add(run: Run, found: Iterable[Trajectory], file: Path, counts: Counter[str]) -> None:
    """Store the episodes that the run does not hold yet, and count all."""
    target = run.paths.trajectories("expert")
    with TrajectoryStore(target) as store:
        held = {one.key: one for one in store}
        for one in found:
            if one.key not in held:
                if run.is_done("expert"):
                    raise RunError(
                        f"{target} is finished, so nothing can be added; import into another run, name=..., or remove "
                        "that file and what was made from it."
                    )
                store.append(one)
            elif not one.environment and one != held[one.key]:
                raise DataError(
                    f"{file}: {one.task.id}: the run holds another conversation under this number, of a file imported "
                    "before. Join the files, and import them into another run, name=..."
                )
            counts["before" if one.key in held else "imported"] += 1
            counts["no_success"] += not succeeded(one)
            counts["cut"] += one.truncated


def demonstrate(env: Any, job: Job, protocol: EpisodeProtocol) -> Trajectory:
    """Play the expert's actions on one task. If the expert raises, the episode is FAILED.

    Args:
        env: An environment that is also an `Expert`.
        job: The episode to play.
        protocol: Rules of the episode. In the react format, an expert without its own thoughts (see `Demonstrator`)
            gets thoughts from a template.
    """
    write = FORMATS[protocol.format].write
    steps = episode(env, job, protocol=protocol, policy="expert")
    try:
        script = [Action(write(thought, action)) for thought, action in _demonstration(env, job.task)]
    except (RunError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  environments are code of others; a failed episode is recorded
        return play_script(steps, [], error)
    failure = EngineFailure(f"the task was not finished after the expert's {len(script)} actions.")
    return play_script(steps, script, failure)


def _demonstration(env: Any, task: Task) -> Sequence[tuple[str, str]]:
    """Return `(thought, action)` for each turn of the expert."""
    if "demonstration" in abilities_of(env):
        return list(env.demonstration(task))
    return [(f"The next thing to do is: {action}.", action) for action in env.expert(task)]


def explore(session: Session, stage: Stage) -> None:
    """Let a policy play the tasks of an exploration, and resume the unfinished episodes of the previous iteration."""
    explorer, file = explorer_of(session.recipe), session.run.paths.trajectories(stage.name)
    with session.run.stage(stage.name, file) as counts:
        if session.ahead is not None:
            counts |= session.ahead.explored(stage)
            session.note_tokens(file, stage.policy)
        else:
            jobs, what = explore_jobs(session, stage), "exploration episodes"
            counts |= session.play(file, jobs, stage.policy, explorer.sampling, explorer.concurrency, what)
        if explorer.traits.resumes_earlier:
            counts |= not_come_back(stage.name, read_trajectories(file))


def explore_jobs(session: Session, stage: Stage) -> list[Job]:
    """Return the jobs of an exploration. If the explorer resumes episodes, the previous exploration must be done."""
    explorer, seed, left = explorer_of(session.recipe), session.recipe.seed, list[Trajectory]()
    if explorer.traits.resumes_earlier and stage.iteration > 1:
        before = session.run.paths.trajectories(f"explore{mark(session.recipe, stage.iteration - 1)}")
        left = sorted(filter(unfinished, read_trajectories(before)), key=lambda one: one.key)
    tasks = dealt(session.task_lists.tasks["explore"], seed, stage.iteration, explorer.per_iteration)
    return jobs_of(explorer, ExploreInputs(seed, stage.iteration, tasks, left), 0)
