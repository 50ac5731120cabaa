"""Number and length of episodes: lengths from those recorded in the run, or from a few that the expert plays now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from perturn.data.outcomes import failed
from perturn.data.paths import RunPaths
from perturn.data.run_folder import memory_in_use, run_folder
from perturn.data.store import read_trajectories
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Job, episode
from perturn.faults import close_world
from perturn.policy.tokens import NO_TURN, Renderer
from perturn.run.collect import demonstrate
from perturn.run.panels import look_up
from perturn.run.session import make_protocol, world_maker
from perturn.settings.recipe import Recipe
from perturn.types import Action, EpisodeProtocol, Status, Task, Trajectory

_PLAYED = 4
"""Episodes played to see how long they are."""
_PATIENCE_SECONDS = 20.0
"""After so long no further one is begun."""


@dataclass(frozen=True)
class Panels:
    """Number of episodes of each stage, and the length of one; tokens are assumed where no expert is to be seen."""

    sft: int
    expert: int
    explore: int
    evaluate: int
    limit: float
    """Mean turn limit of the tasks that are explored or evaluated."""
    turns: float
    """Turns of an expert's episode; of a policy's, where there is no expert."""
    prompt: float = 200.0
    """Tokens before the first action."""
    heard: float = 60.0
    """Tokens of a later observation, with the template around it."""
    said: float = 128.0
    """Tokens of an action."""
    seconds: float = 0.0
    """Seconds of a turn in its world."""
    memory_gb: float = 0.0
    """Memory of this process and one world."""
    source: str = "assumed, as no expert is to be seen"
    """Origin of the lengths."""
    problems: tuple[str, ...] = ()
    """Failures of the episodes played now, a sentence each."""


def look_at_panels(recipe: Recipe, renderer: Renderer | None) -> Panels:
    """Count the tasks and see how long their episodes are; without a renderer, tokens are assumed."""
    if recipe.environment is None:
        return Panels(0, 0, 0, 0, limit=1.0, turns=1.0, memory_gb=memory_in_use() / 1e9)
    protocol = make_protocol(recipe.protocol)
    file = RunPaths(run_folder(recipe)).trajectories("expert")
    recorded = list(read_trajectories(file)) if file.is_file() else []
    env: Any = world_maker(recipe)()
    try:
        found = look_up(recipe, env)
        sft, explore, evaluate = (found.tasks.get(name, []) for name in ("sft", "explore", "evaluate"))
        expert = found.expert
        played, seconds = ([], 0.0) if recorded or not expert else _play(env, expert, protocol)
        problems = (
            _problems(played)
            if recorded or played
            else _problems([_try_out(env, next(iter((*evaluate, *explore, *sft))), protocol)])
        )
        memory = memory_in_use() / 1e9
    finally:
        close_world(env)
    limit = fmean(protocol.limit(task) for task in (*explore, *evaluate, *sft))
    lengths: dict[str, Any] = {"turns": limit}
    if renderer and (shown := [one for one in recorded or played if one.turns]):
        source = f"{len(shown)} {'recorded expert episodes' if recorded else 'expert episodes played now'}"
        lengths = {"source": source} | _lengths(shown[:32], renderer)
    return Panels(
        sft=len(sft),
        expert=len(expert),
        explore=len(explore) * (recipe.explore.samples if recipe.explore else 0),
        evaluate=len(evaluate),
        limit=limit,
        seconds=seconds,
        memory_gb=memory,
        problems=problems,
        **lengths,
    )


def _try_out(env: Any, task: Task, protocol: EpisodeProtocol) -> Trajectory:
    """Pose a task and take one action, the first that is admissible, else any."""
    steps = episode(env, Job(task, seed=0), protocol=protocol)
    try:
        next(steps)
        command = next(iter(env.reset(task, 0).admissible), "look")
        steps.send(Action(FORMATS[protocol.format].write("", command)))
    except StopIteration as end:
        played: Trajectory = end.value
        return played
    except Exception as error:  # noqa: BLE001  environments are code of others
        return Trajectory(task, (), status=Status.FAILED, error=f"{type(error).__name__}: {error}")
    return Trajectory(task, ())


def _problems(played: Iterable[Trajectory]) -> tuple[str, ...]:
    """The errors of the episodes that failed, the most frequent first."""
    errors = Counter(one.error if failed(one) else None for one in played)
    return tuple(
        f"{count} of {errors.total()} episodes played now failed: {error}"
        for error, count in errors.most_common()
        if error is not None
    )


def _play(env: Any, tasks: Sequence[Task], protocol: EpisodeProtocol) -> tuple[list[Trajectory], float]:
    """A few expert episodes of tasks spread over the panel, failed ones too, and the seconds of a turn.

    No episodes where there is no expert.
    """
    if not hasattr(env, "expert"):
        return [], 0.0
    chosen = tasks[:: max(1, len(tasks) // _PLAYED)][:_PLAYED]
    played = [demonstrate(env, Job(task, seed=0), protocol) for task in chosen[:1]]
    began = time.monotonic()  # the first one starts the world
    for task in chosen[1:]:
        if time.monotonic() - began < _PATIENCE_SECONDS:
            played.append(demonstrate(env, Job(task, seed=0), protocol))
    turns = sum(len(one.turns) for one in played[1:])
    return played, (time.monotonic() - began) / max(turns, 1)


def _lengths(shown: Sequence[Trajectory], renderer: Renderer) -> dict[str, float]:
    """Mean lengths of some episodes, as `Panels` has them."""
    encoded = [renderer.encode(one, None) for one in shown]
    first = [next(i for i, turn in enumerate(each.turn) if turn != NO_TURN) for each in encoded]
    said = sum(turn != NO_TURN for each in encoded for turn in each.turn)
    turns = sum(each.turns for each in encoded)
    heard = (sum(len(each.ids) for each in encoded) - said - sum(first)) / max(turns - len(encoded), 1)
    return {"turns": turns / len(encoded), "prompt": fmean(first), "heard": heard, "said": said / turns}
