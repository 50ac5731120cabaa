"""The oracle credit: weights from the true first wrong turn, by itself and in tlm-DRE."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.credit import CREDITS
from perturn.errors import ConfigError, DataError
from perturn.losses import LOSSES, TurnLogprobs
from perturn.run.stages.measure_distance import sense_of
from perturn.types import Action, Remaining, Task, Trajectory, Turn

QUICK = settings(derandomize=True)
PATHS = st.lists(st.integers(0, 9) | st.none(), min_size=2, max_size=9)
LENGTHS = [[2, 1, 3], [4], [1, 2]]
STRAYED = [[4, 3, 3, 2], [5, 5], [3, 2, None]]


def episode(path):
    """A trajectory from the lengths of the way at its start and after each turn."""
    return Trajectory(
        Task("t"), tuple(Turn((), Action("go"), remaining=Remaining(*both)) for both in pairwise(path))
    )


def weigh(path, **choice):
    return CREDITS["first-error"](**choice)([episode(path)])[0].tolist()


def test_hand_worked():
    """A way of 5, 4, 4, 3, 4, 3: turns 1 and 3 are wrong. No error: 1 everywhere. A lost game: wrong to the end."""
    strayed = [5, 4, 4, 3, 4, 3]

    assert weigh(strayed) == pytest.approx([0.2, 1, 1, 1, 1])
    assert weigh(strayed, turns="only") == pytest.approx([0.2, 1, 0.2, 1, 0.2])
    assert weigh([3, 2, 0]) == weigh([3, 2, 0], turns="only") == [1, 1]
    assert weigh([3, 2, None, None], low=0.5, high=2.0) == [0.5, 2, 2]
    assert weigh([1, 1]) == [1]


@QUICK
@given(path=PATHS, low=st.floats(0.1, 1), more=st.floats(0, 3))
def test_identities(path, low, more):
    """Weights never fall along an episode; `only` is at most `from`; their first high turn is the same."""
    high = low + more
    since, only = (weigh(path, turns=turns, low=low, high=high) for turns in ("from", "only"))

    assert since == sorted(since)
    assert all(one <= other for one, other in zip(only, since, strict=True))
    assert since.index(max(since)) == only.index(max(only))


@QUICK
@given(path=PATHS, right=st.integers(1, 4))
def test_right_turns_before_an_error_change_no_other_weight(path, right):
    """They put the error later, and take the low weight."""
    if path[0] is None or weigh(path, low=0.5) == weigh(path, low=1.0):
        path = [3, 4, *[0] * (len(path) - 2)] if path[0] is None else path
    before = [path[0] + left for left in range(right, 0, -1)]
    with_error = any(turn.remaining.is_wrong for turn in episode(path).turns)

    assert weigh([*before, *path])[right:] == weigh(path)
    assert weigh([*before, *path])[:right] == pytest.approx([0.2 if with_error else 1.0] * right)


def weighed(sides):
    """Both sides of pairs with the oracle's weights; all chosen ones are without an error."""
    credit = CREDITS["first-error"]()
    right = [episode(range(len(turns), -1, -1)) for turns in LENGTHS]
    return [
        replace(side, weight=torch.cat(credit(group)))
        for side, group in zip(sides, (right, [episode(path) for path in STRAYED]), strict=True)
    ]


def make_side(seed, drift=0.5):
    """Three trajectories of random log-probabilities, the policy's apart from the reference's by so many nats."""
    draw = torch.Generator().manual_seed(seed)
    reference = [[-torch.rand(n, generator=draw, dtype=torch.float64) for n in turns] for turns in LENGTHS]
    policy = [
        [turn + drift * torch.randn(turn.shape, generator=draw, dtype=torch.float64) for turn in turns]
        for turns in reference
    ]
    return TurnLogprobs.from_nested(policy, reference)


@pytest.fixture
def sides():
    return weighed([make_side(1), make_side(2)])


def value(policies, sides, loss=None):
    return (loss or LOSSES["tlm-dre"]())(
        *(replace(side, policy=policy) for side, policy in zip(sides, policies, strict=True))
    )


def test_gradcheck_of_tlm_dre_with_its_weights(sides):
    policies = [side.policy.detach().clone().requires_grad_() for side in sides]

    assert torch.autograd.gradcheck(lambda *both: value(both, sides), policies)
    chosen, rejected = torch.autograd.grad(value(policies, sides).sum(), policies)
    assert chosen.abs().sum() > 0
    assert rejected.abs().sum() > 0


def test_a_turn_before_the_error_moves_a_fifth_of_what_it_else_would(sides):
    """UKL: d r_l / d log pi is r_l omega / n for each token, and the first turn of the first episode has omega 0.2."""
    policies = [side.policy.detach().clone().requires_grad_() for side in sides]
    _, rejected = torch.autograd.grad(value(policies, sides).sum(), policies)

    assert_close(rejected[0], rejected[3] / 5)  # turns 0 and 2 of the episode 4, 3, 3, 2
    assert_close(rejected[0], rejected[1])


def test_padding_of_nan_changes_nothing(sides):
    """Weights are of turns: rows with NaN where there is no token give the same loss and gradient."""
    padded, leaves = [], []
    for side in sides:
        rows = torch.full((3, 9), torch.nan, dtype=torch.float64)
        reference, turn = rows.clone(), torch.full((3, 9), -1)
        for row in range(3):
            own = side.trajectory == row
            rows[row, 2 : 2 + int(own.sum())] = side.policy[own].detach()
            reference[row, 2 : 2 + int(own.sum())] = side.reference[own]
            turn[row, 2 : 2 + int(own.sum())] = side.turn[own]
        leaves.append(rows.requires_grad_())
        padded.append(replace(TurnLogprobs.from_padded(rows, reference, turn), weight=side.weight))
    policies = [side.policy.detach().clone().requires_grad_() for side in sides]
    flat, spread = value(policies, sides), LOSSES["tlm-dre"]()(*padded)
    flat.sum().backward()
    spread.sum().backward()

    assert_close(spread, flat, rtol=0, atol=0)
    for leaf, policy in zip(leaves, policies, strict=True):
        assert_close(leaf.grad[leaf.isfinite()], policy.grad, rtol=0, atol=0)
        assert leaf.grad[~leaf.isfinite()].abs().sum() == 0


@pytest.mark.parametrize(("low", "high"), [(1e-6, 1.0), (1.0, 1.0), (1.0, 100.0)])
@pytest.mark.parametrize("drift", [0.0, 50.0])
def test_gradients_are_finite_at_both_ends(low, high, drift):
    """The least weight, weights that are all alike, and large ones, with log-ratios of 0 and of tens of nats."""
    credit = CREDITS["first-error"](low=low, high=high)
    weight = torch.cat(credit([episode(path) for path in STRAYED]))
    both = [replace(make_side(seed, drift), weight=weight) for seed in (1, 2)]
    policies = [side.policy.detach().clone().requires_grad_() for side in both]

    found = value(policies, both)
    gradients = torch.autograd.grad(found.sum(), policies)
    assert found.isfinite().all()
    assert all(each.isfinite().all() for each in gradients)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"turns": "until"}, "turns must be one of from, only"),
        ({"low": 0.0}, "low must be > 0"),
        ({"low": 2.0}, "high must be >= low"),
    ],
)
def test_settings_outside_their_range_are_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        CREDITS["first-error"](**choice)


def test_the_remaining_path_is_measured_as_the_credit_reads_it():
    """A recipe has it measured in the sense that the credit reads; turns by themselves are refused."""
    recipe = {
        "name": "x",
        "model": {"name": "smollm2-135m"},
        "environment": {"name": "alfworld-like"},
        "protocol": {"name": "alfworld-lab"},
        "align": {"loss": {"name": "tlm-dre"}},
        "credit": {"name": "first-error"},
    }
    credit = CREDITS["first-error"]()

    assert sense_of(parse(Recipe, recipe)) == "shortest"
    searching = {"credit": {"name": "first-error", "distance": "searching"}}
    assert sense_of(parse(Recipe, recipe | searching)) == "searching"
    with pytest.raises(
        ConfigError, match=r"be equal, since a run measures .* once, got \['searching', 'shortest'\]"
    ):
        sense_of(parse(Recipe, recipe | {"rows": {"name": "corrections", "distance": "searching"}}))
    with pytest.raises(DataError, match=r"turns\[0\]\.remaining was not measured"):
        credit([Trajectory(Task("t"), (Turn((), Action("go")),))])
