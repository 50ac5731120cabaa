"""How long episodes are: those recorded in the run, or a few played by the expert now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from perturn.data.outcomes import failed
from perturn.data.run_folder import memory_in_use, run_folder
from perturn.data.store import read_trajectories
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Job, episode
from perturn.errors import EngineFailure
from perturn.policy.tokens import NO_TURN, Renderer
from perturn.run.collect import demonstrate, play_script
from perturn.run.session import choose_tasks, make_protocol, sft_tasks, world_maker
from perturn.settings.recipe import Recipe
from perturn.types import Action, EpisodeProtocol, Status, Task, Trajectory

_PLAYED = 4
"""Episodes played to see how long they are."""
_PATIENCE_SECONDS = 20.0
"""After so long no further one is begun."""


@dataclass(frozen=True)
class Panels:
    """How many tasks there are, and what an episode of them is like."""

    sft: int
    expert: int
    explore: int
    evaluate: int
    turns: float
    """Turns of an expert's episode; of a policy's, where there is no expert: the limit."""
    limit: float
    """Mean turn limit of the tasks that are explored or evaluated."""
    prompt_tokens: float
    """Tokens before the first action."""
    heard_tokens: float
    """Tokens of a later observation, with the template around it."""
    said_tokens: float
    """Tokens of an action of the expert."""
    seconds: float
    """Seconds of a turn in its world."""
    memory_gb: float
    """What this process and one world hold."""
    source: str
    """Where these lengths come from."""
    problems: tuple[str, ...] = ()
    """What went wrong in the episodes that were played now, a sentence each."""


def look_at_panels(recipe: Recipe, renderer: Renderer) -> Panels:
    """Count the tasks and see how long their episodes are."""
    protocol = make_protocol(recipe.protocol)
    env: Any = world_maker(recipe)()
    try:
        panels = {
            "sft": choose_tasks(env, sft_tasks(recipe)) if recipe.sft else [],
            "explore": choose_tasks(env, recipe.explore.tasks),
            "evaluate": choose_tasks(env, recipe.evaluate.tasks),
        }
        expert = {task.id: task for name in ("sft", "explore") for task in panels[name]}
        file = run_folder(recipe) / "trajectories" / "expert.jsonl"
        shown = [one for one in read_trajectories(file) if one.turns] if file.is_file() else []
        source, seconds = f"{len(shown)} recorded expert episodes", 0.0
        problems: tuple[str, ...] = ()
        if not shown and hasattr(env, "expert"):
            played, seconds = _play(env, list(expert.values()), protocol)
            shown, problems = [one for one in played if one.turns], _problems(played)
            source = f"{len(shown)} expert episodes played now"
        elif not hasattr(env, "expert"):
            problems = _problems([try_out(env, panels["explore"][0], protocol)])
        memory = memory_in_use() / 1e9
    finally:
        env.close()
    lengths = _lengths(shown, renderer)
    limits = [protocol.limit(task) for name in ("explore", "evaluate") for task in panels[name]]
    limit = fmean(limits)
    return Panels(
        sft=len(panels["sft"]),
        expert=len(expert),
        explore=len(panels["explore"]) * recipe.explore.samples,
        evaluate=len(panels["evaluate"]),
        turns=lengths[0] if lengths else limit,
        limit=limit,
        prompt_tokens=lengths[1] if lengths else 200.0,
        heard_tokens=lengths[2] if lengths else 60.0,
        said_tokens=lengths[3] if lengths else float(recipe.explore.sampling.max_new_tokens),
        seconds=seconds,
        memory_gb=memory,
        source=source
        if lengths
        else f"no expert {'succeeded' if problems else 'to play'}: episodes of the turn limit, prompts of 200 tokens",
        problems=problems,
    )


def try_out(env: Any, task: Task, protocol: EpisodeProtocol) -> Trajectory:
    """Pose a task and take one action, the first that the world says it understands, else any."""
    steps = episode(env, Job(task, seed=0), protocol=protocol, policy="nobody")
    command = next(iter(_posed(env, task)), "look")
    played = play_script(steps, [Action(FORMATS[protocol.format].write("", command))], _Enough())
    enough = played.error == f"{_Enough.__name__}: "
    return replace(played, status=Status.COMPLETED, error=None) if enough else played


class _Enough(EngineFailure):
    """Nobody goes on playing."""


def _posed(env: Any, task: Task) -> tuple[str, ...]:
    """Commands that a world says it understands at first; what it raises is heard when the episode is played."""
    try:
        admissible: tuple[str, ...] = env.reset(task, 0).admissible
    except Exception:  # noqa: BLE001  environments are code of others
        return ()
    return admissible


def _problems(played: Sequence[Trajectory]) -> tuple[str, ...]:
    """What to say of those that failed."""
    errors = Counter(one.error for one in played if failed(one))
    return tuple(
        f"{count} of {len(played)} episodes played now failed: {error}"
        for error, count in errors.most_common()
    )


def _play(env: Any, tasks: Sequence[Task], protocol: EpisodeProtocol) -> tuple[list[Trajectory], float]:
    """A few expert episodes of tasks spread over the panel, failed ones too, and the seconds of a turn."""
    chosen = tasks[:: max(1, len(tasks) // _PLAYED)][:_PLAYED]
    played = [demonstrate(env, Job(task, seed=0), protocol) for task in chosen[:1]]
    began, turns = time.monotonic(), 0  # the first one starts the world
    for task in chosen[1:]:
        if time.monotonic() - began < _PATIENCE_SECONDS:
            played.append(demonstrate(env, Job(task, seed=0), protocol))
            turns += len(played[-1].turns)
    return played, (time.monotonic() - began) / max(turns, 1)


def _lengths(shown: Sequence[Trajectory], renderer: Renderer) -> tuple[float, float, float, float] | None:
    """Turns, tokens before the first action, tokens heard later, tokens said."""
    encoded = [renderer.encode(one, None) for one in shown[:32]]
    if not encoded:
        return None
    first = [next(i for i, turn in enumerate(each.turn) if turn != NO_TURN) for each in encoded]
    said = sum(turn != NO_TURN for each in encoded for turn in each.turn)
    turns = sum(each.turns for each in encoded)
    heard = sum(len(each.ids) for each in encoded) - said - sum(first)
    later = turns - len(encoded)
    return turns / len(encoded), fmean(first), heard / later if later else 0.0, said / turns
