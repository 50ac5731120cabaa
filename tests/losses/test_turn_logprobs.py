"""TurnLogprobs: segments, reductions by segment, constructors and their errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import TurnLogprobs
from perturn.losses.dpo import DPO

QUICK = settings(derandomize=True)
LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)

POLICY = [[[-0.1, -0.3], [-0.8]], [[-1.0, -2.0, -3.0]]]
REFERENCE = [[[-0.2, -0.2], [-1.8]], [[-1.5, -1.5, -1.5]]]
NUMBERS = [[0.5, 1.5], [2.0]]


def flat(**changes):
    """Return a valid construction with some fields changed: 2 trajectories of 2 and 1 turns."""
    fields = {
        "policy": torch.zeros(4),
        "reference": torch.zeros(4),
        "turn": torch.tensor([0, 0, 1, 0]),
        "trajectory": torch.tensor([0, 0, 0, 1]),
    }
    return TurnLogprobs(**(fields | changes))


def test_counts_and_maps_describe_the_segments():
    """Trajectory 0 has turns of 2 and 1 tokens, trajectory 1 one turn of 3."""
    side = TurnLogprobs.from_nested(POLICY, REFERENCE)

    assert (side.num_turns, side.num_trajectories) == (3, 2)
    assert side.tokens_per_turn.tolist() == [2, 1, 3]
    assert side.tokens_per_trajectory.tolist() == [3, 3]
    assert side.turns_per_trajectory.tolist() == [2, 1]
    assert side.turn_trajectory.tolist() == [0, 0, 1]
    assert side.turn_position.tolist() == [0, 1, 0]
    assert side.turn_index.tolist() == [0, 0, 1, 2, 2, 2]


def test_reductions_by_segment_match_hand_worked_values():
    """Turn sums -0.4, -0.8, -6; means -0.2, -0.8, -2; trajectory sums -1.2, -6; means -0.4, -2."""
    side = TurnLogprobs.from_nested(POLICY, REFERENCE)
    policy = side.policy

    assert_close(side.sum_by_turn(policy), torch.tensor([-0.4, -0.8, -6.0]))
    assert_close(side.mean_by_turn(policy), torch.tensor([-0.2, -0.8, -2.0]))
    assert_close(side.sum_by_trajectory(policy), torch.tensor([-1.2, -6.0]))
    assert_close(side.mean_by_trajectory(policy), torch.tensor([-0.4, -2.0]))
    assert_close(side.sum_over_turns(side.mean_by_turn(policy)), torch.tensor([-1.0, -2.0]))
    assert_close(side.mean_over_turns(side.mean_by_turn(policy)), torch.tensor([-0.5, -2.0]))


def test_confidence_is_the_geometric_mean_of_the_reference():
    """Means of log pi_ref are -0.2, -1.8, -1.5; log-ratios are the differences token by token."""
    side = TurnLogprobs.from_nested(POLICY, REFERENCE)

    assert_close(side.confidence(), torch.tensor([-0.2, -1.8, -1.5]).exp())
    assert_close(side.log_ratio(), torch.tensor([0.1, -0.1, 1.0, 0.5, -0.5, -1.5]))


@QUICK
@given(lengths=LENGTHS)
def test_turn_ids_may_restart_or_count_through_the_batch(make_side, lengths):
    """Ids 0, 1, 0 and 0, 1, 2 cut the batch at the same places, and so do ids with gaps."""
    side = make_side(0, lengths)
    through = TurnLogprobs(side.policy, side.reference, side.turn_index, side.trajectory)
    gapped = TurnLogprobs(side.policy, side.reference, 7 * side.turn + 3, side.trajectory)

    for other in (through, gapped):
        assert torch.equal(other.turn_position, side.turn_position)
        assert torch.equal(other.turn_trajectory, side.turn_trajectory)
        assert torch.equal(other.sum_by_turn(other.policy), side.sum_by_turn(side.policy))


@QUICK
@given(lengths=LENGTHS)
def test_segment_sums_agree_with_loops(make_side, lengths):
    """Sums by turn and by trajectory are those of plain Python over the nested lists."""
    side = make_side(1, lengths)
    tokens = iter(side.policy.tolist())
    nested = [[[next(tokens) for _ in range(n)] for n in turns] for turns in lengths]
    by_turn = torch.tensor([math.fsum(turn) for turns in nested for turn in turns], dtype=torch.float64)
    means = [math.fsum(math.fsum(turn) / len(turn) for turn in turns) / len(turns) for turns in nested]

    assert_close(side.sum_by_turn(side.policy), by_turn)
    assert_close(
        side.mean_over_turns(side.mean_by_turn(side.policy)), torch.tensor(means, dtype=torch.float64)
    )
    assert side.turns_per_trajectory.tolist() == [len(turns) for turns in lengths]


def test_low_precision_is_raised_and_double_is_kept():
    """5000 tokens of -0.1: in bfloat16 a running sum would stall near -32, in float32 it reaches -500."""
    side = TurnLogprobs.from_nested([[torch.full((5000,), -0.1, dtype=torch.bfloat16)]], [[[-0.2] * 5000]])

    assert side.sum_by_turn(side.policy).dtype == torch.float32
    assert side.log_ratio().dtype == torch.float32
    assert_close(side.sum_by_turn(side.policy), torch.tensor([-500.0]), rtol=2e-3, atol=0)
    double = TurnLogprobs.from_nested([[torch.zeros(2, dtype=torch.float64)]])
    assert double.sum_by_trajectory(double.policy).dtype == torch.float64


def test_nested_tensors_carry_their_gradient():
    """Each token of a turn's sum has gradient 1, whether the turn is a tensor or a list of tensors."""
    turn, token = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor(-3.0, requires_grad=True)

    side = TurnLogprobs.from_nested([[turn, [token, -0.5]]], [[[-1.0, -1.0], [-1.0, -1.0]]])
    side.sum_by_trajectory(side.log_ratio()).sum().backward()

    assert_close(turn.grad, torch.ones(2))
    assert_close(token.grad, torch.tensor(1.0))
    assert side.policy.tolist() == [-1.0, -2.0, -3.0, -0.5]


def test_the_reference_receives_no_gradient():
    reference = torch.tensor([-1.0], requires_grad=True)
    side = TurnLogprobs.from_nested([[torch.tensor([-2.0], requires_grad=True)]], [[reference]])

    (side.log_ratio().sum() + side.confidence().sum()).backward()

    assert reference.grad is None


def test_padded_rows_give_the_same_batch_as_nested_lists():
    """A token without loss inside a turn does not cut it in two."""
    nan = math.nan
    policy = torch.tensor([[nan, -0.1, nan, -0.3, -0.8], [-1.0, -2.0, -3.0, nan, nan]])
    reference = torch.tensor([[nan, -0.2, nan, -0.2, -1.8], [-1.5, -1.5, -1.5, nan, nan]])
    turn = torch.tensor([[-1, 0, -1, 0, 1], [0, 0, 0, -1, -1]])
    numbers = torch.tensor([0.5, 1.5, 2.0])
    further = {"behavior": reference, "proximal": policy, "weight": numbers, "clip": numbers}

    side, expected = (
        TurnLogprobs.from_padded(policy, reference, turn, **further),
        TurnLogprobs.from_nested(POLICY, REFERENCE, NUMBERS, REFERENCE, POLICY, NUMBERS),
    )

    for name in (*further, "policy", "reference", "turn", "trajectory", "turn_index", "turn_position"):
        assert torch.equal(getattr(side, name), getattr(expected, name))
    assert TurnLogprobs.from_padded(policy, None, turn).reference is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": torch.zeros(2, 2)}, r"policy must have shape \[tokens\], got \[2, 2\]"),
        ({"reference": torch.zeros(3)}, r"reference must have shape \[4\], got \[3\]"),
        ({"turn": torch.zeros(5, dtype=torch.long)}, r"turn must have shape \[4\], got \[5\]"),
        ({"policy": torch.zeros(4, dtype=torch.long)}, "policy must be floating point, got torch.int64"),
        ({"turn": torch.zeros(4)}, "turn must hold integer ids, got torch.float32"),
        ({"trajectory": torch.zeros(4, dtype=torch.bool)}, "trajectory must hold integer ids"),
        ({"trajectory": torch.tensor([0, 0, 2, 2])}, r"trajectory ids must be 0\.\.n-1"),
        ({"trajectory": torch.tensor([1, 1, 1, 2])}, r"trajectory ids must be 0\.\.n-1"),
        ({"trajectory": torch.tensor([0, 1, 1, 0])}, r"trajectory ids must be 0\.\.n-1"),
        ({"turn": torch.tensor([0, 1, 0, 0])}, "turn ids must not decrease"),
        ({"turn": torch.tensor([-1, 0, 1, 0])}, "turn ids must be >= 0, got -1"),
        (
            {"has_spread": torch.ones(3, dtype=torch.bool)},
            r"has_spread must have shape \[2\], one for each traj",
        ),
        ({"has_spread": torch.ones(2)}, r"has_spread must be boolean, got torch\.float32"),
        ({"reference": torch.zeros(4, device="meta")}, "reference must be on cpu as policy is, got meta"),
    ],
)
def test_malformed_fields_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        flat(**changes)


def test_an_empty_batch_is_refused():
    nothing = torch.zeros(0)

    with pytest.raises(ValueError, match="at least one token"):
        TurnLogprobs(nothing, None, nothing.long(), nothing.long())


@pytest.mark.parametrize(
    ("policy", "reference", "message"),
    [
        ([], None, "policy must hold at least one trajectory"),
        ([[[-1.0]], []], None, "policy must hold at least one turn in trajectory 1, got none"),
        ([[[-1.0], []]], None, "policy, trajectory 0, turn 1: expected at least one token"),
        (
            [[-1.0, -2.0]],
            None,
            r"policy, trajectory 0, turn 0: expected the log-probabilities \[tokens\], got -1",
        ),
        ([[torch.zeros(1, 2)]], None, r"trajectory 0, turn 0: expected the log-probabilities \[tokens\]"),
        ([-1.0], None, "policy must hold at least one turn in trajectory 0"),
        (
            [[[-1.0], [-1.0]]],
            [[[-1.0], [-1.0, -2.0]]],
            "trajectory 0, turn 1: policy has 1 tokens, but reference 2",
        ),
        ([[[-1.0], [-1.0]]], [[[-1.0]]], "trajectory 0, turn 1: policy has 1 tokens, but reference 0"),
        ([[[-1.0]]], [[[-1.0]], [[-1.0]]], "policy holds 1 trajectories, but reference 2"),
        ([[[-1.0]]], [[[]]], "reference, trajectory 0, turn 0: expected at least one token"),
    ],
)
def test_malformed_nesting_names_the_place(policy, reference, message):
    with pytest.raises(ValueError, match=message):
        TurnLogprobs.from_nested(policy, reference)


@pytest.mark.parametrize(
    ("shape", "turn", "message"),
    [
        ((1, 2), [0, 0], r"turn must have shape \[trajectories, positions\], got \[2\]"),
        ((1, 3), [[0, 0]], r"policy must have shape \[1, 2\] as turn has, got \[1, 3\]"),
        ((2, 2), [[0, 0], [-1, -1]], "trajectory 1 must hold at least one token with turn >= 0"),
        ((1, 2), [[0, -100]], r"turn must be -1 \(no loss\) or a turn id >= 0, got -100"),
        ((1, 2), [[0.0, 1.0]], "turn must hold integer ids, got torch.float32"),
    ],
)
def test_malformed_padding_is_refused(shape, turn, message):
    with pytest.raises(ValueError, match=message):
        TurnLogprobs.from_padded(torch.zeros(shape), None, torch.tensor(turn))


def test_a_missing_reference_names_the_remedy():
    side = TurnLogprobs.from_nested(POLICY)

    with pytest.raises(ValueError, match="Pass reference= when building TurnLogprobs"):
        side.log_ratio()


def test_values_of_the_wrong_length_are_refused():
    """Turn values where token values belong would otherwise be summed over the wrong segments."""
    side = TurnLogprobs.from_nested(POLICY)

    for reduce in (side.sum_by_turn, side.sum_by_trajectory):
        with pytest.raises(ValueError, match=r"shape \[6\] \(tokens\), got \[3\]"):
            reduce(torch.zeros(3))
    with pytest.raises(ValueError, match=r"shape \[3\] \(turns\), got \[6\]"):
        side.sum_over_turns(torch.zeros(6))


def test_sides_of_different_size_are_refused():
    """One trajectory against two would otherwise be broadcast."""
    one, two = TurnLogprobs.from_nested(POLICY[:1]), TurnLogprobs.from_nested(POLICY)

    with pytest.raises(ValueError, match="got 1 chosen and 2 rejected"):
        DPO()(one, two)
