"""Quantity `tool-matches`: similarity of tool calls to the matched calls of the environment's expert."""

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
    expert_action,
    greedy_matches,
    hard_matches,
    named_error,
    soft_matches,
    understand,
)
from perturn.methods.matchtir.matchtir_credit import ToolMatches


def check_gold_calls(env: Any, tasks: Sequence[Task], name: str) -> None:
    """Reject an environment without an expert, or with an expert that calls no tool.

    Args:
        env: The environment.
        tasks: Tasks; the expert is checked on the first task.
        name: Part that compares tool calls, such as `credit matchtir`, for error messages.

    Raises:
        ConfigError: If the environment has no expert.
        DataError: If the expert calls no tool.
    """
    reader = f"{name} compares tool calls with the calls of the environment's expert"
    check_abilities(env, "expert", reader=reader, otherwise="a credit without an expert")
    for task in tasks[:1]:
        gold_calls(env, task)


def matches_of(
    episodes: Sequence[Trajectory], request: ToolMatches, env: Any, name: str = "the credit"
) -> list[list[list[float]]]:
    """Match the tool calls of each episode with the gold calls of its task; a FAILED episode has no matches.

    Returns:
        Similarity of each call to its matched gold call `[episodes][turns][calls]`; see `match`.

    Raises:
        ConfigError: If the environment has no expert.
        DataError: If a task has no gold calls.
        EnvironmentFailure: If the expert raises an error.
    """
    played = {one.task.id: one.task for one in episodes if not failed(one)}
    check_gold_calls(env, list(played.values()), name)
    gold = {each: gold_calls(env, task) for each, task in played.items()}
    return [
        [[] for _ in one.turns] if failed(one) else match(one, gold[one.task.id], request) for one in episodes
    ]


def gold_calls(env: Any, task: Task) -> list[ToolCall]:
    """Return the gold calls of a task: the tool calls of the environment's expert, in order.

    Raises:
        DataError: If the expert calls no tool.
        EnvironmentFailure: If the expert raises an error.
    """
    try:
        said = [expert_action(action) for action in env.expert(task)]
    except PerturnError:
        raise
    except Exception as error:  # environments may be third-party code
        raise EnvironmentFailure(
            f"the expert of {env.name} cannot solve task {task.id!r:.80}: {named_error(error)}"
        ) from error
    found = [call for action in said for call in action.calls]
    if not found:
        raise DataError(
            f"task {task.id!r:.80} has no gold calls, for the expert of {env.name} calls no tool in it; leave the task "
            "out, or take a credit that compares no calls, such as rloo."
        )
    return found


def match(episode: Trajectory, gold: Sequence[ToolCall], request: ToolMatches) -> list[list[float]]:
    """Match the calls of one episode with the gold calls of its task, regardless of the order of the calls.

    Args:
        episode: Recorded episode.
        gold: Gold calls of its task.
        request: Settings of the matching.

    Returns:
        Similarity of each call to its matched gold call; with the soft assignment, its share of similarity
        `[turns][calls]`.
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
    """Return the tool calls of a turn; for a malformed action, one call that matches nothing."""
    said = understand(turn.action)[1]
    if said is not None and said.calls:
        return list(said.calls)
    return [] if said is not None and turn.valid else [NO_CALL]


class GoldCallMatches(Quantity):
    """Similarity of each tool call to its matched gold call; 0: no match.

    Gold calls are the tool calls of the environment's expert. The credit gets the similarities as argument
    `tool_matches` `[trajectories][turns][calls]`.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "the expert's calls, and an assignment an episode",
        reads_world=True,
        note="No turn of these processes calls a tool: this is how the credit weighs their own rewards.",
    )
    request: ClassVar[type[Need]] = ToolMatches

    def check(self, request: ToolMatches, planned: Planned) -> None:
        """Reject an environment without an expert, or with an expert that calls no tool.

        Raises:
            PerturnError: If one of these holds; the message names alternatives.
        """
        if planned.env is not None:
            check_gold_calls(planned.env, planned.tasks, planned.reader)

    def compute(self, request: ToolMatches, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the similarities, with the expert of the environment in which the episodes were played."""
        with source.world() as env:
            return Computed(matches_of(episodes, request, env))

    def exact(self, request: ToolMatches, ground: Ground) -> list[list[tuple[()]]]:
        """Return an empty list of calls for each turn, since no turn of a small process calls a tool."""
        return [[()] * len(steps) for steps in ground.episodes.steps]
