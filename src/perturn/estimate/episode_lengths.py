"""Number and lengths of a run's episodes, from recorded episodes or from a few episodes that are played now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import sqrt
from statistics import fmean
from typing import Any

from perturn.chat.tokens import NO_TURN, Renderer
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.data.run_folder import run_folder
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.envs.abilities import abilities_of
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import Job, episode
from perturn.episodes.replay import play_script
from perturn.errors import EngineFailure
from perturn.explore.protocol import ExploreInputs, jobs_of
from perturn.faults import closing_world
from perturn.formats.read_rows import rows_of
from perturn.free_memory import memory_in_use
from perturn.io.read_input import user_path
from perturn.run.policy_origin import find_maker
from perturn.run.protocol_rules import evaluation_sampling, make_protocol
from perturn.run.session import make_renderer, world_maker
from perturn.run.stages.branch_stage import explorer_of
from perturn.run.stages.collect_stage import demonstrate, own_episodes
from perturn.run.stages.pretraining_stage import lessons
from perturn.run.stages.row_stage import ROWS_OF
from perturn.run.task_lists import TaskLists, dealt
from perturn.table import locate
from perturn.types import (
    Action,
    EpisodeProtocol,
    PreferencePair,
    Task,
    Trajectory,
    WeightedTrajectory,
    failed,
    succeeded,
)

_READ = 32
"""Number of the user's own rows or recorded episodes that are read to measure lengths."""
_PLAYED = 4
"""Number of episodes that are played to measure lengths."""
_PATIENCE_SECONDS = 20.0
"""Seconds after which no further episode is started."""


@dataclass(frozen=True)
class Episodes:
    """Number of episodes in each stage, and average lengths; token counts are assumed if there is no expert."""

    base: int = 0
    lessons: int = 0
    sft: int = 0
    expert: int = 0
    explore: int = 0
    """Number of explored episodes. If values are learned from another run's exploration, that run's number."""
    evaluate: int = 0
    limit: float = 1.0
    """Average turn limit of the tasks."""
    turns: float = 1.0
    """Average number of turns in an expert episode; without an expert, the turn limit."""
    prompt: float = 200.0
    """Average number of tokens before the first action."""
    heard: float = 60.0
    """Average number of tokens of a later observation, chat template included."""
    said: float = 128.0
    """Average number of tokens of an action."""
    seconds: float = 0.0
    """Average seconds of the environment per turn."""
    world_seconds: float = 0.0
    """Seconds in which an environment starts."""
    memory_gb: float = 0.0
    """Memory of this process with one environment, in gigabytes."""
    step_seconds: tuple[float, ...] = ()
    """Seconds of each environment step that was timed now, besides the steps of the first episode."""
    turn_counts: tuple[int, ...] = ()
    """Number of turns of each recorded explored episode."""
    answer_tokens: tuple[int, ...] = ()
    """Number of tokens of each action in the expert episodes."""
    source: str = "assumed, as no expert is to be seen"
    """Origin of the lengths, in words."""
    problems: tuple[str, ...] = ()
    """Sentences on failures of the episodes that were played now."""
    most: int | None = None
    """Token limit of an action, if the run trains no policy on expert episodes; otherwise None."""

    def policy_turns(self, learned: bool) -> float:
        """Return the assumed number of turns in a policy episode.

        Args:
            learned: Whether the run has trained the policy. If it was trained on expert episodes, the mean of the
                expert's turns and the turn limit is assumed; otherwise the turn limit.
        """
        return (self.turns + self.limit) / 2 if learned and self.most is None else self.limit

    def policy_said(self, most: int | None = None) -> float:
        """Return the assumed number of tokens of a trained policy's action: as many as the expert's.

        If the run trains no policy on expert episodes, an action may be as short as the expert's or as long as the
        limit. The geometric mean is assumed.

        Args:
            most: Token limit of an action. If None, the limit of the run is used.
        """
        if self.most is None:
            return self.said
        limit = most or self.most
        return sqrt(limit * min(limit, self.said))


RendererOf = Callable[[Sequence[Trajectory]], Renderer]
"""Function that returns a renderer; a word tokenizer that the run builds takes its words from the given episodes."""


def renderer_of(recipe: Recipe) -> RendererOf:
    """Return a function that makes the renderer of a run's first model."""
    if recipe.base is None:
        found = make_renderer(recipe, recipe.model.name)
        return lambda _: found
    context, make = recipe.base.shape.context, locate("perturn.chat.word_tokenizer:make_tokenizer")
    return lambda shown: Renderer(
        make((str(message["content"]) for one in shown for message in one.messages), context)
    )


def look_at_episodes(recipe: Recipe, task_lists: TaskLists | None, renderer: RendererOf | None) -> Episodes:
    """Count a run's episodes, and measure their lengths from recorded episodes or a few that the expert plays now.

    Args:
        recipe: Recipe of the run.
        task_lists: Task lists of the stages; None, without an environment: only the user's own rows are counted.
        renderer: Makes the renderer for token counts; None: token counts are assumed.
    """
    own, shown = recipe.expert and recipe.expert.file, _recorded(recipe)
    # Own episodes are used for all task lists.
    counts: dict[str, Any] = {"sft": sum(map(succeeded, shown))} if own and recipe.sft else {}
    if task_lists is None:
        lengths = _lengths_of_shown(shown, "recorded expert episodes", renderer)
        counts |= lengths | ({"limit": lengths["turns"]} if lengths else {})
        return Episodes(memory_gb=memory_in_use() / 1e9, **counts | _lengths_of_rows(recipe, renderer))
    protocol = make_protocol(recipe.protocol)
    source, seconds, began = "recorded expert episodes", 0.0, time.monotonic()
    steps: tuple[float, ...] = ()
    played: list[Trajectory] = []
    with closing_world(world_maker(recipe)()) as env:
        known = task_lists.expert or task_lists.tasks.get("base") or task_lists.tasks.get("evaluate")
        if known and "expert" in abilities_of(env) and (recipe.staleness or not shown):
            played, seconds, steps, first = _play(env, known, protocol)
            starting = max(0.0, first - began - seconds * len(played[0].turns))
            source, shown = (source, shown) if shown else ("expert episodes played now", played)
        elif shown:
            starting = time.monotonic() - began
        else:
            played = [
                _try_out(env, next(task for tasks in task_lists.tasks.values() for task in tasks), protocol)
            ]
            starting = time.monotonic() - began
        memory = memory_in_use() / 1e9
    limit = fmean(protocol.limit(task) for tasks in task_lists.tasks.values() for task in tasks)
    lengths = _lengths_of_shown(shown, source, renderer)
    lengths = lengths or {"turns": limit, "said": _assumed_answer(recipe)}
    counts = {name: len(tasks) for name, tasks in task_lists.tasks.items()} | counts
    if recipe.explore:
        counts["explore"] = _rollouts(recipe, task_lists.tasks["explore"])
    elif recipe.evaluate and "explored" in recipe.evaluate.needs and (maker := find_maker(recipe)):
        counts["explore"] = maker.episodes
    if recipe.base:
        counts["lessons"] = len(lessons(recipe.base, task_lists.tasks["base"]))
        counts["base"] *= 1 + recipe.base.clumsy
    return Episodes(
        **counts,
        expert=len(task_lists.expert),
        limit=limit,
        seconds=seconds,
        step_seconds=steps,
        world_seconds=starting,
        memory_gb=memory,
        problems=_problems(played),
        turn_counts=_explored_turns(recipe),
        most=None if recipe.base or recipe.sft else _limit(recipe),
        **lengths,
    )


def _recorded(recipe: Recipe) -> list[Trajectory]:
    """Return the recorded expert episodes of a run; if there are none, the episodes of the user's own file."""
    file = RunPaths(run_folder(recipe)).trajectories("expert")
    shown = list(read_trajectories(file)) if file.is_file() else []
    own = recipe.expert and recipe.expert.file
    return list(own_episodes(user_path(own, "expert.file"))) if own and not shown else shown


def _lengths_of_shown(
    shown: Sequence[Trajectory], source: str, renderer: RendererOf | None
) -> dict[str, Any]:
    """Return the average lengths of the first expert episodes, and their source; empty if nothing can be counted."""
    shown = [one for one in shown if one.turns]
    if renderer is None or not shown:
        return {}
    return {"source": f"{len(shown)} {source}"} | _lengths(shown[:_READ], renderer(shown[:_READ]))


def _assumed_answer(recipe: Recipe) -> float:
    """Return the assumed number of tokens of an action, at most the recipe's limit."""
    parts = (part.sampling for part in (recipe.explore, recipe.evaluate) if part is not None)
    return float(min([int(Episodes.said), *(part.max_new_tokens for part in parts if part is not None)]))


def _limit(recipe: Recipe) -> int:
    """Return the token limit of an action in explored episodes, or else in evaluations."""
    own = recipe.explore.sampling if recipe.explore else None
    return (own or evaluation_sampling(recipe)).max_new_tokens


def _lengths_of_rows(recipe: Recipe, renderer: RendererOf | None) -> dict[str, Any]:
    """Return the average lengths of the first rows of the user's own file; empty without such a file.

    Of a file of explored episodes, also return their number.
    """
    explored = recipe.explore.traits.source if recipe.explore else None
    own = explored or (recipe.rows.traits.source if recipe.rows else None)
    if own is None or (renderer is None and explored is None):
        return {}
    kind = ROWS_OF[recipe.rows.traits.makes] if recipe.rows and explored is None else Trajectory
    source: Iterator[Any] = rows_of(user_path(own, "rows.path" if explored is None else "explore.path"), kind)
    rows: list[Any] = list(islice(source, _READ))
    counts = {"explore": len(rows) + sum(1 for _ in source)} if explored else {}
    shown = [side for row in rows for side in _sides(row) if side.turns]
    if not shown or renderer is None:
        return counts
    found = _lengths(shown, renderer(shown))
    return counts | found | {"limit": found["turns"], "source": f"the first {len(rows)} rows of {own}"}


def _sides(row: Trajectory | PreferencePair | WeightedTrajectory) -> tuple[Trajectory, ...]:
    """Return the trajectories of a row."""
    if isinstance(row, PreferencePair):
        return row.chosen, row.rejected
    return (row.trajectory if isinstance(row, WeightedTrajectory) else row,)


def _rollouts(recipe: Recipe, tasks: Sequence[Task]) -> int:
    """Return the mean number of rollouts in an iteration, if all later iterations have as many as the last one."""
    explorer, last = explorer_of(recipe), recipe.iterations
    dealt_to = {number: dealt(tasks, recipe.seed, number, explorer.per_iteration) for number in (1, last)}
    jobs = {
        number: len(jobs_of(explorer, ExploreInputs(recipe.seed, number, each), 0))
        for number, each in dealt_to.items()
    }
    return round((jobs[1] + (last - 1) * jobs[last]) / last)


def _explored_turns(recipe: Recipe) -> tuple[int, ...]:
    """Return the number of turns of each episode in this run's last recorded exploration."""
    paths = RunPaths(run_folder(recipe))
    explored = [stage.name for stage in stages(recipe) if stage.name.startswith("explore")]
    files = [paths.trajectories(name) for name in reversed(explored)]
    last = next((file for file in files if file.is_file()), None)
    return () if last is None else tuple(len(each.turns) for each in read_trajectories(last) if each.turns)


class _Timed:
    """Environment whose steps are timed."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the environment."""
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        """Do the environment's step."""
        began = time.monotonic()
        found = self._env.step(action)
        self.seconds.append(time.monotonic() - began)
        return found


def _play(
    env: Any, tasks: Sequence[Task], protocol: EpisodeProtocol
) -> tuple[list[Trajectory], float, tuple[float, ...], float]:
    """Play a few expert episodes, spread over the task list.

    Returns:
        The episodes; the average seconds of a turn; the seconds of each step, without the first episode; the end of
        the first episode by `time.monotonic`.
    """
    chosen, timed = tasks[:: max(1, len(tasks) // _PLAYED)][:_PLAYED], _Timed(env)
    played = [demonstrate(env, Job(chosen[0], seed=0), protocol)]
    began = time.monotonic()  # the first episode includes the environment's start
    for task in chosen[1:]:
        if time.monotonic() - began < _PATIENCE_SECONDS:
            played.append(demonstrate(timed, Job(task, seed=0), protocol))
    turns = sum(len(one.turns) for one in played[1:])
    return played, (time.monotonic() - began) / max(turns, 1), tuple(timed.seconds), began


def _try_out(env: Any, task: Task, protocol: EpisodeProtocol) -> Trajectory:
    """Play one turn with a fixed action, and return the episode."""
    once = replace(protocol, max_turns=1, max_turns_by_kind={})
    look = Action(FORMATS[protocol.format].write("", "look"))
    return play_script(episode(env, Job(task, seed=0), protocol=once), [look], EngineFailure("unfinished"))


def _problems(played: Iterable[Trajectory]) -> tuple[str, ...]:
    """Return sentences on the errors of failed episodes, the most frequent error first."""
    errors = Counter(one.error if failed(one) else None for one in played)
    return tuple(
        f"{count} of {errors.total()} episodes played now failed: {error}"
        for error, count in errors.most_common()
        if error is not None
    )


def _lengths(shown: Sequence[Trajectory], renderer: Renderer) -> dict[str, Any]:
    """Return the average lengths of some episodes, by their field names in `Episodes`."""
    encoded = [renderer.encode(one, every_turn=True) for one in shown]
    first = [next(i for i, turn in enumerate(each.turn) if turn != NO_TURN) for each in encoded]
    said = sum(turn != NO_TURN for each in encoded for turn in each.turn)
    counts = Counter((at, turn) for at, each in enumerate(encoded) for turn in each.turn if turn != NO_TURN)
    turns = sum(each.turns for each in encoded)
    heard = (sum(len(each.ids) for each in encoded) - said - sum(first)) / max(turns - len(encoded), 1)
    mean = {"turns": turns / len(encoded), "prompt": fmean(first), "heard": heard, "said": said / turns}
    return mean | {"answer_tokens": tuple(counts.values())}
