"""Log-probabilities of one side of a batch as flat tensors, and reductions from tokens to trajectories."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from perturn.credit import Credit, TurnCredit
from perturn.losses.nested_lists import (
    NestedLogprobs,
    check_dtype,
    check_padded,
    check_same_nesting,
    flatten,
    segments,
    turn_lengths,
)
from perturn.needs import Reference, reads


@dataclass(frozen=True, eq=False)
class TurnLogprobs:
    """Log-probabilities of the tokens that carry loss, with the turn and the trajectory of each token.

    Only tokens that carry loss are present, so there is no padding to mask. A turn ends where (trajectory, turn)
    changes between neighbouring tokens. So turn ids may restart in each trajectory, or count through the batch. The
    end-of-turn token belongs to its turn.

    Reductions compute in float32 if the inputs are bfloat16 or float16, and in the dtype of the inputs otherwise. All
    counts are computed at construction, so no later call waits for the device.
    """

    policy: Tensor
    """log pi of each token, in nats [tokens]. It carries the gradient."""

    reference: Tensor | None
    """log pi_ref of each token, in nats [tokens]; None: no reference. It carries no gradient."""

    turn: Tensor
    """Turn id of each token, >= 0 and not decreasing within a trajectory [tokens]."""

    trajectory: Tensor
    """Trajectory id of each token, 0..n-1 and not decreasing [tokens]."""

    weight: Tensor | None = None
    """Weight of each turn from a credit, without unit [turns]; None: the loss calls its own credit."""

    behavior: Tensor | None = None
    """Log-probability of each token under the behavior policy mu, in nats [tokens]; None: not needed."""

    proximal: Tensor | None = None
    """Log-probability of each token under the behavior policy as the training code computes it, in nats [tokens]; None:
    not needed."""

    clip: Tensor | None = None
    """Factor on the clip range of each turn, > 0, without unit [turns]; None: 1. A loss without a clip range ignores
    it."""

    has_spread: Tensor | None = None
    """Whether the group of each trajectory has weights other than 0, as booleans [trajectories]; None: all True.
    `ppo-clip` averages its clipped term over the trajectories where it is True."""

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> further number of each token [tokens], for the names in `LossTraits.reads`. Inputs that are computed from
    the trained policy carry a gradient."""

    turn_index: Tensor = field(init=False, repr=False)
    """Index of each token's turn within the batch [tokens]."""

    num_turns: int = field(init=False, repr=False)
    """Number of turns in the batch."""

    num_trajectories: int = field(init=False, repr=False)
    """Number of trajectories in the batch."""

    def __post_init__(self) -> None:
        """Check the tensors, and count turns and trajectories. No other method waits for the device."""
        if self.policy.dim() != 1:
            raise ValueError(f"policy must have shape [tokens], got {list(self.policy.shape)}.")
        for name in ("policy", "turn", "trajectory", "reference", "behavior", "proximal"):
            self._check(name, getattr(self, name), len(self.policy))
        for name, values in self.inputs.items():
            self._check(f"inputs[{name!r}]", values, len(self.policy))
        if not len(self.policy):
            raise ValueError("a batch must hold at least one token that carries loss, got none.")
        found = segments(self.turn.long(), self.trajectory.long())
        for name, value in zip(("turn_index", "num_turns", "num_trajectories"), found, strict=True):
            object.__setattr__(self, name, value)
        for name in ("weight", "clip"):
            self._check(name, getattr(self, name), self.num_turns, ", one for each turn")
        self._check("has_spread", self.has_spread, self.num_trajectories, ", one for each trajectory")
        if self.clip is not None and not bool(((self.clip > 0) & self.clip.isfinite()).all()):
            raise ValueError(f"clip must be finite and > 0, got {self.clip.tolist()!r:.200}.")

    def _check(self, name: str, tensor: Tensor | None, count: int, what: str = "") -> None:
        if tensor is None:
            return
        if tensor.shape != (count,):
            raise ValueError(f"{name} must have shape [{count}]{what}, got {list(tensor.shape)}.")
        if tensor.device != self.policy.device:
            raise ValueError(f"{name} must be on {self.policy.device} as policy is, got {tensor.device}.")
        check_dtype(name, tensor)

    @classmethod
    def from_nested(
        cls,
        policy: NestedLogprobs,
        reference: NestedLogprobs | None = None,
        weight: Sequence[Sequence[float] | Tensor] | None = None,
        behavior: NestedLogprobs | None = None,
        proximal: NestedLogprobs | None = None,
        clip: Sequence[Sequence[float] | Tensor] | None = None,
        inputs: Mapping[str, NestedLogprobs] | None = None,
    ) -> Self:
        """Build a batch from nested lists.

        Args:
            policy: log pi, in nats `[trajectories][turns][tokens]`. Lists of numbers get torch's default dtype. An
                innermost list may be a tensor, which keeps its dtype and its gradient.
            reference: log pi_ref, in nats `[trajectories][turns][tokens]`; or None.
            weight: Weight of each turn, without unit `[trajectories][turns]`; or None.
            behavior: log mu, in nats `[trajectories][turns][tokens]`; or None.
            proximal: log pi_proximal, in nats `[trajectories][turns][tokens]`; or None.
            clip: Factor on the clip range of each turn, without unit `[trajectories][turns]`; or None.
            inputs: Name -> further number of each token `[trajectories][turns][tokens]`; or None.

        Returns:
            The flat batch.

        Raises:
            ValueError: If a level is empty, or an input has another nesting than `policy`.
        """
        lengths = turn_lengths("policy", policy)
        others = {"reference": reference, "behavior": behavior, "proximal": proximal}
        inputs = inputs or {}
        for name, other in (others | dict(inputs)).items():
            if other is not None:
                check_same_nesting(name, lengths, turn_lengths(name, other))
        of_turns = {"weight": weight, "clip": clip}
        for name, numbers in of_turns.items():
            if numbers is not None and [len(turns) for turns in numbers] != [len(turns) for turns in lengths]:
                raise ValueError(
                    f"{name} must hold one number for each turn, {[len(turns) for turns in lengths]} by trajectory, "
                    f"got {[len(turns) for turns in numbers]}."
                )
        flat = flatten(policy)
        turn = [i for turns in lengths for i, n in enumerate(turns) for _ in range(n)]
        trajectory = [k for k, turns in enumerate(lengths) for _ in range(sum(turns))]
        return cls(
            policy=flat,
            turn=torch.tensor(turn, device=flat.device),
            trajectory=torch.tensor(trajectory, device=flat.device),
            **{
                name: None if numbers is None else flatten([numbers]).to(flat.device)
                for name, numbers in of_turns.items()
            },
            **{name: None if other is None else flatten(other) for name, other in others.items()},
            inputs={name: flatten(other) for name, other in inputs.items()},
        )

    @classmethod
    def from_padded(
        cls,
        policy: Tensor,
        reference: Tensor | None,
        turn: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        behavior: Tensor | None = None,
        proximal: Tensor | None = None,
        weight: Tensor | None = None,
        clip: Tensor | None = None,
        has_spread: Tensor | None = None,
    ) -> Self:
        """Build a batch from padded rows with one trajectory each.

        Only tokens that carry loss are selected. So values in other positions, even NaN, affect neither the loss nor
        its gradient. If tokens without loss stand between tokens of one turn, the turn is not split.

        Args:
            policy: log pi, in nats [trajectories, positions].
            reference: log pi_ref, in nats [trajectories, positions]; or None.
            turn: Turn id of each token [trajectories, positions]; -1: the token carries no loss.
            inputs: Name -> further number of each token [trajectories, positions]; or None.
            behavior: log mu, in nats [trajectories, positions]; or None.
            proximal: log pi_proximal, in nats [trajectories, positions]; or None.
            weight: Weight of each turn that has a token with loss, without unit [turns]; or None.
            clip: Factor on the clip range of each turn that has a token with loss, without unit [turns]; or None.
            has_spread: Whether the group of each trajectory has weights other than 0 [trajectories]; or None.

        Returns:
            The flat batch.
        """
        inputs = inputs or {}
        others = {"reference": reference, "behavior": behavior, "proximal": proximal}
        check_padded({"policy": policy, **others, **inputs}, turn)
        loss_mask = turn >= 0
        return cls(
            policy=policy[loss_mask],
            turn=turn[loss_mask],
            trajectory=loss_mask.nonzero()[:, 0],
            **{name: None if other is None else other[loss_mask] for name, other in others.items()},
            inputs={name: values[loss_mask] for name, values in inputs.items()},
            weight=weight,
            clip=clip,
            has_spread=has_spread,
        )

    @cached_property
    def turn_trajectory(self) -> Tensor:
        """Trajectory id of each turn [turns]."""
        trajectory = self.trajectory.long()
        return trajectory.new_zeros(self.num_turns).scatter(0, self.turn_index, trajectory)

    @cached_property
    def turn_position(self) -> Tensor:
        """Position t of each turn in its trajectory, from 0 [turns]."""
        first_turn = self.turns_per_trajectory.cumsum(0) - self.turns_per_trajectory
        turns = torch.arange(self.num_turns, device=self.turn_index.device)
        return turns - first_turn[self.turn_trajectory]

    @cached_property
    def tokens_per_turn(self) -> Tensor:
        """Number of tokens n_i of each turn [turns]."""
        return self.sum_by_turn(torch.ones_like(self.turn_index))

    @cached_property
    def tokens_per_trajectory(self) -> Tensor:
        """Number of tokens n of each trajectory [trajectories]."""
        return self.sum_by_trajectory(torch.ones_like(self.turn_index))

    @cached_property
    def turns_per_trajectory(self) -> Tensor:
        """Number of turns T of each trajectory [trajectories]."""
        return self.sum_over_turns(torch.ones_like(self.turn_trajectory))

    @property
    def precision(self) -> torch.dtype:
        """Dtype in which reductions compute: float64 if `policy` is float64, else float32."""
        return torch.float64 if self.policy.dtype == torch.float64 else torch.float32

    def log_ratio(self) -> Tensor:
        """Return u = log pi - log pi_ref of each token, in nats [tokens]."""
        return _raise_precision(self.policy) - self.frozen_reference()

    def frozen_reference(self) -> Tensor:
        """Return log pi_ref of each token, without gradient, in nats [tokens].

        Raises:
            ValueError: If the batch has no reference.
        """
        if self.reference is None:
            raise ValueError(
                "this loss needs reference log-probabilities, got reference=None. "
                "Pass reference= when building TurnLogprobs, or choose a loss that needs none (sft)."
            )
        return _raise_precision(self.reference.detach())

    def input(self, name: str) -> Tensor:
        """Return a further input of each token, at least in float32 [tokens].

        Raises:
            ValueError: If the batch has no input with this name.
        """
        if name not in self.inputs:
            raise ValueError(
                f"this loss reads {name!r} of each token, and the batch has {', '.join(self.inputs) or 'no inputs'}. "
                "Name it in LossTraits.reads, or pass inputs= when building TurnLogprobs."
            )
        return _raise_precision(self.inputs[name])

    def confidence(self) -> Tensor:
        """Return p_i, the geometric mean of pi_ref over the tokens of each turn, in (0, 1] [turns]."""
        return self.mean_by_turn(self.frozen_reference()).exp()

    def sum_by_turn(self, values: Tensor) -> Tensor:
        """Sum token values [tokens] over each turn [turns]."""
        return _segment_sum(values, self.turn_index, self.num_turns, "tokens")

    def mean_by_turn(self, values: Tensor) -> Tensor:
        """Average token values [tokens] over each turn [turns]."""
        return self.sum_by_turn(values) / self.tokens_per_turn

    def sum_by_trajectory(self, values: Tensor) -> Tensor:
        """Sum token values [tokens] over each trajectory [trajectories]."""
        return _segment_sum(values, self.trajectory.long(), self.num_trajectories, "tokens")

    def mean_by_trajectory(self, values: Tensor) -> Tensor:
        """Average token values [tokens] over each trajectory; every token weighs the same [trajectories]."""
        return self.sum_by_trajectory(values) / self.tokens_per_trajectory

    def sum_over_turns(self, values: Tensor) -> Tensor:
        """Sum turn values [turns] over each trajectory [trajectories]."""
        return _segment_sum(values, self.turn_trajectory, self.num_trajectories, "turns")

    def mean_over_turns(self, values: Tensor) -> Tensor:
        """Average turn values [turns] over each trajectory; every turn weighs the same [trajectories]."""
        return self.sum_over_turns(values) / self.turns_per_trajectory


def weighted_sum(side: TurnLogprobs, values: Tensor, weight: Tensor) -> Tensor:
    """Return sum_i w_i sum_j x_ij for each trajectory [trajectories].

    For log-probabilities x, this is the logarithm of the weighted product over tokens that papers write.
    """
    return side.sum_over_turns(weight * side.sum_by_turn(values))


def weighted_token_mean(side: TurnLogprobs, values: Tensor, weight: Tensor) -> Tensor:
    """Return (1/n) sum_i w_i sum_j x_ij for each trajectory: a mean over tokens of w x [trajectories].

    The divisor is n, not sum_i w_i n_i. So weights of 0.2 give a fifth of the result for weights of 1.
    """
    return weighted_sum(side, values, weight) / side.tokens_per_trajectory


def weighted_turn_mean(side: TurnLogprobs, values: Tensor, weight: Tensor) -> Tensor:
    """Return (1/T) sum_i w_i (1/n_i) sum_j x_ij for each trajectory: a mean over turns of w x [trajectories]."""
    return side.mean_over_turns(weight * side.mean_by_turn(values))


REDUCTIONS: dict[str, Callable[[TurnLogprobs, Tensor, Tensor], Tensor]] = {
    "sum": weighted_sum,
    "token_mean": weighted_token_mean,
    "turn_mean": weighted_turn_mean,
}
"""Name -> function from values x_ij of the tokens of a side [tokens] and weights w_i of its turns [turns] to one number
per trajectory, in the unit of x [trajectories]."""


def turn_weights(side: TurnLogprobs, credit: Credit) -> Tensor:
    """Return the weights of a batch; if it has none, compute them with a credit.

    Args:
        side: The batch.
        credit: Credit of the loss's paper.

    Returns:
        Weights, without unit and without gradient, at least in float32 [turns].

    Raises:
        ValueError: If the batch has no weights, and the credit needs a whole group to compute them.
    """
    if side.weight is not None:
        return side.weight.detach().to(side.precision)
    if not isinstance(credit, TurnCredit):
        raise ValueError(
            f"the batch has no weight, and {type(credit).__name__} needs the whole group of a task to give one. "
            "Call the credit on the group, and pass what it returns as weight= when building TurnLogprobs."
        )
    position = side.turn_position.to(side.precision)
    turns = side.turns_per_trajectory[side.turn_trajectory].to(side.precision)
    confidence = side.confidence() if reads(credit.needs, Reference) else None
    return credit.weigh(position, turns, confidence)


def reduced_log_ratio(side: TurnLogprobs, credit: TurnCredit, reduction: str = "sum") -> Tensor:
    """Return the log-ratio of each trajectory of a side, with turn weights and a reduction, in nats [trajectories]."""
    return REDUCTIONS[reduction](side, side.log_ratio(), turn_weights(side, credit))


def reduced_log_ratios(
    chosen: TurnLogprobs, rejected: TurnLogprobs, credit: TurnCredit, reduction: str = "sum"
) -> tuple[Tensor, Tensor]:
    """Return `reduced_log_ratio` of the chosen and of the rejected side, in nats, each [pairs].

    Raises:
        ValueError: If the sides have different numbers of trajectories.
    """
    if chosen.num_trajectories != rejected.num_trajectories:
        raise ValueError(
            "chosen and rejected must hold one trajectory for each pair, "
            f"got {chosen.num_trajectories} chosen and {rejected.num_trajectories} rejected."
        )
    return reduced_log_ratio(chosen, credit, reduction), reduced_log_ratio(rejected, credit, reduction)


def _raise_precision(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _segment_sum(values: Tensor, segment: Tensor, count: int, axis: str) -> Tensor:
    """Sum the values of each segment [segments], given the segment id of each value, from 0 to count - 1."""
    if values.shape != segment.shape:
        raise ValueError(f"values must have shape {list(segment.shape)} ({axis}), got {list(values.shape)}.")
    values = _raise_precision(values)
    return values.new_zeros(count).index_add(0, segment, values)
