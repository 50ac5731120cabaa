"""What the tests of the losses share: random sides, NaN padding, golden values, gradient checks."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from perturn.losses import TurnLogprobs

Lengths = list[list[int]]

CHOSEN_LENGTHS: Lengths = [[2, 1, 3], [4], [1, 2]]
REJECTED_LENGTHS: Lengths = [[1], [3, 2], [2, 2, 1, 1]]


def _make_side(
    seed: int, lengths: Lengths, *, drift: float = 0.5, dtype: torch.dtype = torch.float64
) -> TurnLogprobs:
    """Return random trajectories: about half of the turns are ones the reference is confident of."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = [], []
    for turns in lengths:
        policy.append([])
        reference.append([])
        for n in turns:
            scale = 0.05 if torch.rand(1, generator=generator) < 0.5 else 1.5
            of_reference = -scale * torch.rand(n, generator=generator, dtype=torch.float64)
            noise = drift * torch.randn(n, generator=generator, dtype=torch.float64)
            reference[-1].append(of_reference.to(dtype))
            policy[-1].append((of_reference + noise).to(dtype))
    return TurnLogprobs.from_nested(policy, reference)


def _pad(side: TurnLogprobs) -> tuple[Tensor, Tensor, Tensor]:
    """Spread a side over padded rows with NaN before, inside and after the tokens."""
    width = 2 * int(side.tokens_per_trajectory.max()) + 3
    policy = torch.full((side.num_trajectories, width), math.nan, dtype=side.policy.dtype)
    reference, turn = policy.clone(), torch.full(policy.shape, -1)
    for k in range(side.num_trajectories):
        own = side.trajectory == k
        positions = 2 + 2 * torch.arange(int(own.sum()))
        policy[k, positions] = side.policy[own]
        reference[k, positions] = side.reference[own]
        turn[k, positions] = side.turn[own]
    return policy, reference, turn


def _with_grad(side: TurnLogprobs) -> TurnLogprobs:
    return dataclasses.replace(side, policy=side.policy.detach().clone().requires_grad_())


@pytest.fixture(scope="session")
def make_side() -> Callable[..., TurnLogprobs]:
    """Return the builder of random sides."""
    return _make_side


@pytest.fixture(scope="session")
def pair() -> tuple[TurnLogprobs, TurnLogprobs]:
    """Return three chosen and three rejected trajectories in float64."""
    return _make_side(1, CHOSEN_LENGTHS), _make_side(2, REJECTED_LENGTHS)


@pytest.fixture(scope="session")
def assert_gradcheck(pair: tuple[TurnLogprobs, TurnLogprobs]) -> Callable[[Any], None]:
    """Return a check that autograd agrees with finite differences on both sides."""
    chosen, rejected = pair

    def check(loss: Any) -> None:
        def value(chosen_policy: Tensor, rejected_policy: Tensor) -> Tensor:
            return loss(
                dataclasses.replace(chosen, policy=chosen_policy),
                dataclasses.replace(rejected, policy=rejected_policy),
            )

        inputs = (_with_grad(chosen).policy, _with_grad(rejected).policy)
        to_chosen, *_ = torch.autograd.grad(value(*inputs).sum(), inputs, allow_unused=True)
        assert to_chosen.abs().sum() > 0
        assert torch.autograd.gradcheck(value, inputs)

    return check


@pytest.fixture(scope="session")
def assert_padding_is_inert(pair: tuple[TurnLogprobs, TurnLogprobs]) -> Callable[[Any], None]:
    """Return a check that NaN in padded positions changes neither the loss nor its gradient."""

    def check(loss: Any) -> None:
        flat = [_with_grad(side) for side in pair]
        rows = [_pad(side) for side in pair]
        leaves = [policy.requires_grad_() for policy, _, _ in rows]
        padded = [TurnLogprobs.from_padded(*row) for row in rows]
        expected, value = loss(*flat), loss(*padded)
        expected.sum().backward()
        value.sum().backward()

        assert_close(value, expected, rtol=0, atol=0)
        for side, leaf, (_, _, turn) in zip(flat, leaves, rows, strict=True):
            if side.policy.grad is None:  # a loss that ignores this side
                assert leaf.grad is None
                continue
            assert_close(leaf.grad[turn >= 0], side.policy.grad, rtol=0, atol=0)
            assert torch.all(leaf.grad[turn < 0] == 0)

    return check


@pytest.fixture(scope="session")
def assert_finite() -> Callable[[Any], None]:
    """Return a check of float32 values and gradients for +-50 nats on each of 4000 tokens of a side."""

    def side(log_ratio: float) -> TurnLogprobs:
        policy, reference = (-1.0, -51.0) if log_ratio > 0 else (-51.0, -1.0)
        lengths = [[1], [400] * 10]
        nested = [[[[value] * n for n in turns] for turns in lengths] for value in (policy, reference)]
        return _with_grad(TurnLogprobs.from_nested(*nested))

    def check(loss: Any) -> None:
        for of_chosen in (50.0, -50.0):
            for of_rejected in (50.0, -50.0):
                chosen, rejected = side(of_chosen), side(of_rejected)
                value = loss(chosen, rejected)
                value.sum().backward()

                assert value.dtype == torch.float32
                assert value.isfinite().all()
                for one in (chosen, rejected):
                    assert one.policy.grad is None or one.policy.grad.isfinite().all()

    return check


@pytest.fixture(scope="session")
def assert_golden() -> Callable[[str, type], None]:
    """Return a check of every golden case of one loss; 1e-10 is far above float64 rounding here."""
    golden = json.loads((Path(__file__).parent.parent / "golden" / "losses.json").read_text())

    def side(name: str, weight: list | None) -> TurnLogprobs:
        tensors = [
            [[torch.tensor(turn, dtype=torch.float64) for turn in turns] for turns in golden[name][of]]
            for of in ("policy", "reference")
        ]
        return TurnLogprobs.from_nested(*tensors, weight)

    def check(name: str, loss_type: type) -> None:
        cases = [case for case in golden["cases"] if case["loss"] == name]
        assert cases
        for case in cases:
            sides = (side(of, case.get("weight", {}).get(of)) for of in ("chosen", "rejected"))
            value = loss_type(**case["settings"])(*sides)
            expected = torch.tensor(case["values"], dtype=torch.float64)
            assert_close(value, expected, rtol=1e-10, atol=1e-12, msg=lambda m, case=case: f"{case}: {m}")

    return check
