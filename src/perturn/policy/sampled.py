"""Episodes that a policy has sampled, as rows of training: what it sampled them with, and the weights of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from perturn.credit import Credit
from perturn.errors import DataError
from perturn.policy.reference import asked
from perturn.policy.tokens import Encoded, Example
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory

Row = Trajectory | WeightedTrajectory | PreferencePair
"""A row that training takes."""


def behavior_logprobs(trajectory: Trajectory, encoded: Encoded) -> Tensor:
    """Log-probabilities that the actions were sampled with.

    Args:
        trajectory: As it was played.
        encoded: As training sees it; turns that it leaves out are left out here.

    Returns:
        log mu of its loss tokens, in nats [loss tokens].

    Raises:
        DataError: If an action does not hold one for each of its tokens.
    """
    found: list[float] = []
    for index in sorted(set(encoded.loss_turns)):
        action, tokens = trajectory.turns[index].action, encoded.loss_turns.count(index)
        if action.token_ids is None or action.logprobs is None or len(action.logprobs) != tokens:
            held = "none" if action.token_ids is None or action.logprobs is None else len(action.logprobs)
            raise DataError(
                f"task {trajectory.task.id!r}: turns[{index}].action must hold the log-probability that each of its "
                f"{tokens} tokens was sampled with, and holds {held}; collect the episodes with an engine that gives "
                "token_ids and logprobs, such as local or vllm."
            )
        found += action.logprobs
    return torch.tensor(found)


def with_weight(example: Example, weight: Sequence[float]) -> Example:
    """The example of one trajectory with weights of all its turns; those of turns that are left out go with them."""
    kept = [weight[turn] for turn in sorted(set(example.chosen.loss_turns))]
    return replace(example, weight=(torch.tensor(kept, dtype=torch.float32),))


def weigh_groups(examples: Sequence[Example], rows: Sequence[Row], credit: Credit) -> list[Example]:
    """The examples with the weights of a credit that compares the episodes of a group.

    A group is the rows of one task and one policy, each with all of its turns, whatever a length limit leaves out; a
    credit whose statistics run across tasks gets those of all tasks.

    Args:
        examples: As training sees the rows.
        rows: Each a trajectory; or all of them with weights, which stay as they are.
        credit: It is asked once a group.

    Raises:
        DataError: If some rows have weights and others have none.
        ConfigError: If the credit gives anything but one finite number a turn.
    """
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    across = getattr(credit, "across_tasks", False)
    played: dict[int, Trajectory] = {}
    for index, row in enumerate(rows):
        if isinstance(row, Trajectory):
            groups[(row.policy,) if across else (row.task.id, row.policy)].append(index)
            played[index] = row
    if played and len(played) < len(rows):
        raise DataError(
            f"{len(rows) - len(played)} of {len(rows)} rows have weights, and the others have none; the credit "
            f"{type(credit).__name__} compares whole groups, so give all rows weights, or none."
        )
    found = list(examples)
    for members in groups.values():
        for index, weight in zip(members, asked(credit, [played[i] for i in members]), strict=True):
            found[index] = with_weight(examples[index], weight.tolist())
    return found
