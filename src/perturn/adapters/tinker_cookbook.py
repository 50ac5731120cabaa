"""Adapter for tinker-cookbook 0.6: training data with one advantage per turn.

`assemble_training_data` replaces tinker-cookbook's `compute_advantages` and its function `assemble_training_data`. A
turn is a transition, with its own reward. The last transition also gets the trajectory's final reward. Environments may
record a key of the state before a turn in `logs["state_key"]` of the transition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from perturn.adapters.host_batches import HostEpisode, weigh_episodes
from perturn.adapters.host_credits import STATES, HostCredit, host_credit
from perturn.credit import Credit
from perturn.errors import DataError

VERSIONS = ">=0.6,<0.7"

_STATE = "state_key"


def make_credit(credit: str | Mapping[str, Any] | Credit) -> HostCredit:
    """Return a credit for `assemble_training_data`.

    Args:
        credit: A credit, the name of a credit, or a section `credit`.

    Raises:
        ConfigError: If the credit is unknown, or tinker-cookbook does not provide one of its inputs.
    """
    return host_credit("tinker-cookbook", credit, {STATES: None})


def turn_advantages(groups: Sequence[Any], credit: HostCredit) -> list[list[list[float]]]:
    """Return the advantage of each transition `[groups][trajectories][transitions]`.

    Args:
        groups: Groups of type `TrajectoryGroup`.
        credit: Credit from `make_credit`.
    """
    episodes = [
        _episode(str(number), one, float(final))
        for number, group in enumerate(groups)
        for one, final in zip(group.trajectories_G, group.final_rewards_G, strict=True)
    ]
    left = iter(weigh_episodes(episodes, credit))
    return [[next(left)[: len(one.transitions)] for one in group.trajectories_G] for group in groups]


def _episode(group: str, trajectory: Any, final: float) -> HostEpisode:
    rewards = [float(one.reward) for one in trajectory.transitions] or [0.0]
    rewards[-1] += final
    states = [one.logs.get(_STATE) for one in trajectory.transitions]
    return HostEpisode(group, rewards, states if states and None not in states else None)


def assemble_training_data(
    groups: Sequence[Any], credit: HostCredit, include_provenance: bool = True
) -> tuple[list[Any], list[dict[str, int]]]:
    """Return the training data of all groups, with an advantage at each token, and the origin of each datum.

    Args:
        groups: Groups of type `TrajectoryGroup`.
        credit: Credit from `make_credit`.
        include_provenance: Same as in tinker-cookbook.

    Returns:
        Data for training, and for each datum the indices `group_idx` and `traj_idx` of its trajectory.

    Raises:
        DataError: If tinker-cookbook trains fewer tokens than the actions have.
    """
    import tinker
    from tinker_cookbook.rl.data_processing import trajectory_to_data

    data, origins = [], []
    for at, (group, advantages) in enumerate(zip(groups, turn_advantages(groups, credit), strict=True)):
        for number, (one, of_turns) in enumerate(zip(group.trajectories_G, advantages, strict=True)):
            made = trajectory_to_data(one, 1.0, include_provenance=include_provenance)
            left = _of_tokens(one.transitions, of_turns)
            for datum in made:
                trained = datum.loss_fn_inputs["advantages"].to_torch()  # 1 at the tokens of actions
                numbers = [next(left, 0.0) if own else 0.0 for own in trained.tolist()]
                datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_torch(
                    torch.tensor(numbers, dtype=trained.dtype)
                )
            if next(left, None) is not None:
                raise DataError(
                    f"trajectory {number} of group {at}: an action stands first in its sequence, where tinker-cookbook "
                    "trains no token; give every transition an observation."
                )
            data += made
            origins += [{"group_idx": at, "traj_idx": number}] * len(made)
    return data, origins


def _of_tokens(transitions: Sequence[Any], advantages: Sequence[float]) -> Iterator[float]:
    """Yield the advantage of each token of an action that tinker-cookbook trains."""
    from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY

    for one, advantage in zip(transitions, advantages, strict=True):
        if float(one.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0.0)) < 1.0:
            yield from [advantage] * len(one.ac.tokens)
