"""SPO: advantages of segments between turns from which episodes were played on."""

from fractions import Fraction
from math import nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit.branch_forest import segment_advantages
from perturn.credit.returns import Return

SPO = CREDITS["spo"]


def test_hand_worked(episode):
    """Scores 1 and 0. The first: 1/4 - 0 over turns 0 and 1, 3/4 - 1/4 at 2, and 1 - 3/4 at 3. The other: 0 - 1."""
    group = [episode([None] * 4, [0.0, 0.0, 0.0, 1.0]), episode([None], [0.0], sample=1)]

    first, other = SPO()(group, branch_returns=[[nan, nan, 0.25, 0.75], [nan]])

    assert_close(first, torch.tensor([0.25, 0.25, 0.5, 0.25], dtype=torch.float64), rtol=0, atol=0)
    assert other.tolist() == [-1.0]


def test_rewards_on_the_way_count_where_they_fall():
    """Start 0.5: 0.2 + 0.6 - 0.5 for turns 0 and 1, whichever of them earned it; then 0.3 - 0.6."""
    found = segment_advantages([0.2, 0.0, 0.3], [nan, nan, 0.6], 0.5)

    assert found == pytest.approx([0.3, 0.3, -0.3])


def test_an_invalid_turn_costs_its_segment(episode):
    """0 - 0.125 + 0.5 - 0 and then 1 - 0.5: the penalty is taken off turn 0."""
    group = [episode([None] * 2, [0.0, 1.0], valid=[False, True]), episode([None], [0.0], sample=1)]

    found = SPO(returns=Return(invalid_penalty=0.125))(group, branch_returns=[[nan, 0.5], [nan]])

    assert found[0].tolist() == [0.375, 0.5]


NUMBER = st.integers(-8, 8).map(lambda n: n / 4)
EPISODE = st.lists(st.tuples(NUMBER, st.one_of(st.just(nan), NUMBER)), min_size=1, max_size=6)


@given(rows=EPISODE, start=NUMBER)
def test_advantages_of_segments_sum_to_the_score_less_the_start(rows, start):
    """One turn of each: what is known in between falls out."""
    rewards, values = zip(*rows, strict=True)
    cuts = [t for t in range(len(rows)) if t == 0 or values[t] == values[t]]

    found = segment_advantages(rewards, values, start)

    assert sum(found[t] for t in cuts) == sum(rewards) - start


@given(rows=EPISODE, start=NUMBER)
def test_it_is_what_fractions_say(rows, start):
    """An independent way: each turn looks for both ends of its segment by itself."""
    rewards, values = zip(*rows, strict=True)
    known = {t: Fraction(v) for t, v in enumerate(values) if t and v == v} | {
        0: Fraction(start),
        len(rows): Fraction(0),
    }
    expected = []
    for turn in range(len(rows)):
        begin, end = max(t for t in known if t <= turn), min(t for t in known if t > turn)
        expected.append(float(sum(map(Fraction, rewards[begin:end])) + known[end] - known[begin]))

    assert segment_advantages(rewards, values, start) == expected


def test_without_branches_it_is_rloo(episode):
    group = [episode([None] * n, [0.0] * (n - 1) + [s], sample=n) for n, s in ((1, 2.0), (2, 0.0), (3, 1.0))]

    found = SPO()(group, branch_returns=[[nan] * len(one.turns) for one in group])

    for one, other in zip(found, CREDITS["rloo"]()(group), strict=True):
        assert_close(one, other, rtol=0, atol=1e-12)


def test_a_trajectory_alone_has_nothing_to_begin_with(episode):
    assert SPO()([episode([None] * 2, [0.0, 1.0])], branch_returns=[[nan, 0.5]])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("branches", "said"),
    [
        (None, "needs branch_returns="),
        ([[nan]], "one entry per turn"),
        ([[nan, nan, nan]], "one entry per turn"),
        ([[nan, float("inf")]], "finite, or NaN"),
    ],
)
def test_values_that_do_not_fit_are_refused(episode, branches, said):
    with pytest.raises(ValueError, match=said):
        SPO()([episode([None] * 2, [0.0, 1.0])], branch_returns=branches)
