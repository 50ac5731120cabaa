"""Quantity `tool-matches`: tool calls of episodes, matched with the calls of the environment's expert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

from perturn.extend import DataError, EnvironmentFailure, Need, PerturnError, Task, Trajectory, Turn, failed
from perturn.extend.quantity_tools import (
    NO_CALL,
    Computed,
    Ground,
    Planned,
    Quantity,
    QuantityTraits,
    Source,
    ToolCall,
    call_similarity,
    check_abilities,
    error_text,
    expert_action,
    greedy_matches,
    hard_matches,
    soft_matches,
    understand,
)
from perturn.methods.matchtir.matchtir_credit import ToolMatches


def check_gold_calls(env: Any, tasks: Sequence[Task], name: str) -> None:
    """Reject to compare tool calls with an expert's in a world without one, or whose expert calls no tool.

    Args:
        env: The world.
        tasks: Of which the first is looked at.
        name: Who compares, such as `credit matchtir`.

    Raises:
        ConfigError: If there is no expert.
        DataError: If he calls no tool.
    """
    reader = f"{name} compares tool calls with the calls of the environment's expert"
    check_abilities(env, "expert", reader=reader, otherwise="a credit without an expert")
    for task in tasks[:1]:
        gold_calls(env, task)


def matches_of(
    episodes: Sequence[Trajectory], request: ToolMatches, env: Any, name: str = "the credit"
) -> list[list[list[float]]]:
    """Match the tool calls of each episode with the gold calls of its task; a FAILED episode has no matches.

    Raises:
        ConfigError: If the world has no expert.
        DataError: If a task has no gold calls.
        EnvironmentFailure: If the expert of the world fails.
    """
    played = {one.task.id: one.task for one in episodes if not failed(one)}
    check_gold_calls(env, list(played.values()), name)
    gold = {each: gold_calls(env, task) for each, task in played.items()}
    return [
        [[] for _ in one.turns] if failed(one) else match(one, gold[one.task.id], request) for one in episodes
    ]


def gold_calls(env: Any, task: Task) -> list[ToolCall]:
    """Return the calls of the expert who solves a task, in their order.

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
            f"the expert of {env.name} cannot solve task {task.id!r:.80}: {type(error).__name__}: {error_text(error)}"
        ) from error
    found = [call for action in said for call in action.calls]
    if not found:
        raise DataError(
            f"task {task.id!r:.80} has no gold calls, for the expert of {env.name} calls no tool in it; leave the task "
            "out, or take a credit that compares no calls, such as rloo."
        )
    return found


def match(episode: Trajectory, gold: Sequence[ToolCall], request: ToolMatches) -> list[list[float]]:
    """Match the calls of one episode with gold calls, all with all, whatever was asked for at the time.

    Args:
        episode: As recorded.
        gold: Gold calls of its task.
        request: How they are matched.

    Returns:
        Similarity of each call to the gold call that it is matched with, or its share of similarity where the
        assignment is soft `[turns][calls]`.
    """
    turns = [calls_of(turn) for turn in episode.turns]
    similarity = [[call_similarity(call, wanted) for wanted in gold] for calls in turns for call in calls]
    if request.assignment == "soft":
        found = soft_matches(similarity, request.regularization)
    else:
        found = {"hard": hard_matches, "greedy": greedy_matches}[request.assignment](similarity)
    rest = iter(found)
    return [list(islice(rest, len(calls))) for calls in turns]


def calls_of(turn: Turn) -> list[ToolCall]:
    """Return the tool calls of a turn; of an action that was no action, one call that is similar to nothing."""
    said = understand(turn.action)[1]
    if said is not None and said.calls:
        return list(said.calls)
    return [] if said is not None and turn.valid else [NO_CALL]


class GoldCallMatches(Quantity):
    """Similarity of each tool call to the gold call that it is matched with; 0: to none.

    Gold calls are the expert's calls in the environment. Given as `tool_matches`, `[trajectories][turns][calls]`.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "the expert's calls, and an assignment an episode",
        reads_world=True,
        note="No turn of these processes calls a tool: this is how the credit weighs their own rewards.",
    )
    request: ClassVar[type[Need]] = ToolMatches

    def check(self, request: ToolMatches, planned: Planned) -> None:
        """Reject a world without an expert, or whose expert calls no tool.

        Raises:
            PerturnError: Saying what to take.
        """
        if planned.env is not None:
            check_gold_calls(planned.env, planned.tasks, planned.reader)

    def compute(self, request: ToolMatches, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the similarities, by the expert of the world that the episodes were played in."""
        with source.world() as env:
            return Computed(matches_of(episodes, request, env))

    def exact(self, request: ToolMatches, ground: Ground) -> list[list[tuple[()]]]:
        """Return no calls, since no turn of a small process calls a tool."""
        return [[()] * len(steps) for steps in ground.episodes.steps]
