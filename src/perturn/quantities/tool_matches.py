"""Tool calls of recorded episodes, matched with the gold calls of their tasks: those of the environment's expert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from perturn.episodes.tool_calls import NO_CALL, ToolCall, call_similarity, expert_action, understand
from perturn.errors import ConfigError, DataError, EnvironmentFailure, PerturnError
from perturn.faults import closing_world
from perturn.io.plain import told
from perturn.run.session import world_maker
from perturn.settings.recipe import Recipe
from perturn.stats.matching import greedy_matches, hard_matches, soft_matches
from perturn.types import Task, Trajectory, Turn, failed


def check_gold_calls(env: Any, tasks: Sequence[Task], name: str) -> None:
    """Refuse to compare tool calls with an expert's in a world without one, or whose expert calls no tool.

    Args:
        env: The world.
        tasks: Of which the first is looked at.
        name: Of the credit that compares.

    Raises:
        ConfigError: If there is no expert.
        DataError: If he calls no tool.
    """
    if not hasattr(env, "expert"):
        raise ConfigError(
            f"credit {name} compares tool calls with those of the environment's expert, and {env.name} has none "
            "(perturn.envs.abilities.Expert); take bfcl, or a credit without, such as rloo."
        )
    for task in tasks[:1]:
        gold_calls(env, task)


def matches_of(episodes: Sequence[Trajectory], credit: Any, recipe: Recipe) -> list[list[list[float]]]:
    """Match the tool calls of each episode with the gold calls of its task; those of one that FAILED with none.

    Raises:
        ConfigError: If the recipe's world has no expert.
        DataError: If a task has no gold calls.
        EnvironmentFailure: If the expert of the world fails.
    """
    played = {one.task.id: one.task for one in episodes if not failed(one)}
    with closing_world(world_maker(recipe)()) as env:
        check_gold_calls(env, list(played.values()), type(credit).__name__)
        gold = {name: gold_calls(env, task) for name, task in played.items()}
    return [
        [[] for _ in one.turns] if failed(one) else match(one, gold[one.task.id], credit) for one in episodes
    ]


def gold_calls(env: Any, task: Task) -> list[ToolCall]:
    """The calls of the expert who solves a task, in their order.

    Raises:
        DataError: If there are none.
        EnvironmentFailure: If the expert fails.
    """
    try:
        said = [expert_action(action) for action in env.expert(task)]
    except PerturnError:
        raise
    except Exception as error:  # environments are code of others
        raise EnvironmentFailure(
            f"the expert of {env.name} cannot solve task {task.id!r:.80}: {type(error).__name__}: {told(error)}"
        ) from error
    found = [call for action in said for call in action.calls]
    if not found:
        raise DataError(
            f"task {task.id!r:.80} has no gold calls, for the expert of {env.name} calls no tool in it; leave the task "
            "out, or take a credit that compares no calls, such as rloo."
        )
    return found


def match(episode: Trajectory, gold: Sequence[ToolCall], credit: Any) -> list[list[float]]:
    """Match the calls of one episode with gold calls, all with all, whatever was asked for at the time.

    Args:
        episode: As recorded.
        gold: Gold calls of its task.
        credit: Its `assignment` and `regularization` say how.

    Returns:
        Similarity of each call to the gold call that it is matched with, or its share of similarity where the
        assignment is soft `[turns][calls]`.
    """
    turns = [calls_of(turn) for turn in episode.turns]
    similarity = [[call_similarity(call, wanted) for wanted in gold] for calls in turns for call in calls]
    if credit.assignment == "soft":
        found = soft_matches(similarity, getattr(credit, "regularization", 0.1))
    else:
        found = {"hard": hard_matches, "greedy": greedy_matches}[credit.assignment](similarity)
    rest = iter(found)
    return [list(islice(rest, len(calls))) for calls in turns]


def calls_of(turn: Turn) -> list[ToolCall]:
    """The tool calls of a turn; of an action that was no action, one call that is similar to nothing."""
    said = understand(turn.action)[1]
    if said is not None and said.calls:
        return list(said.calls)
    return [] if said is not None and turn.valid else [NO_CALL]
