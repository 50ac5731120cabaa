"""V0: a score less what was to be expected before the first turn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perturn.credit import CREDITS
from support.states import episode as _episode

V0 = CREDITS["v0"]
NUMBER = st.integers(-8, 8).map(lambda n: n / 4)
GROUP = st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=3), min_size=1, max_size=4)


def numbers(found):
    return [one.tolist() for one in found]


def test_hand_worked(episode):
    """Scores 1, 0, 0.5 and V 0.5, 0.25, 0.75: alone 0.5, -0.25, -0.25.

    Counting for one of three: (0.5 + 0.5) / 3, (0.25 + 1.5) / 3 and (0.75 + 1) / 3 are taken off.
    """
    group = [
        episode([None] * 2, [0.0, 1.0]),
        episode([None], [0.0], sample=1),
        episode([None], [0.5], sample=2),
    ]
    values = [[[0.5, 9.0], [7.0]], [[0.25]], [[0.75]]]

    assert numbers(V0()(group, values=values)) == [[0.5, 0.5], [-0.25], [-0.25]]
    assert numbers(V0(prior=1.0)(group, values=values)) == [
        pytest.approx([2 / 3, 2 / 3]),
        pytest.approx([-1.75 / 3]),
        pytest.approx([-0.25 / 3]),
    ]


@given(rows=GROUP, prior=st.sampled_from([0.5, 2.0, 100.0]))
def test_it_lies_between_rloo_and_the_value_alone(rows, prior):
    """The weight of each is its share of what is counted; a prior of 0 is RLOO where there are others."""
    group = [
        _episode([None] * len(row), [reward for reward, _ in row], sample=i) for i, row in enumerate(rows)
    ]
    values = [[value for _, value in row] for row in rows]
    share = prior / (prior + len(rows) - 1)

    alone, both, none = (
        torch.cat(V0(prior=each)(group, values=values)).double() for each in (None, prior, 0.0)
    )
    rloo = torch.cat(CREDITS["rloo"]()(group)) if len(rows) > 1 else alone

    torch.testing.assert_close(none, rloo, rtol=0, atol=1e-9)
    torch.testing.assert_close(both, share * alone + (1 - share) * rloo, rtol=0, atol=1e-9)


def test_tasks_are_apart_and_an_episode_without_turns_has_none(episode):
    """Alone in its task with a prior, it has V; no turn of another task is in its baseline."""
    group = [
        episode([None], [1.0]),
        episode([None], [9.0], task="other"),
        episode([], [], task="other", sample=1),
    ]

    assert numbers(V0(prior=3.0)(group, values=[[0.25], [1.0], []])) == [[0.75], [9.0 - 3 / 4], []]


def test_values_stand_for_the_undiscounted_return(episode):
    found = V0().value_targets([episode([None] * 2, [0.5, 1.0])], [[3, 2]])

    assert found == [[[1.5], [1.0]]]


@pytest.mark.parametrize(
    ("values", "said"),
    [(None, "needs values="), ([[0.5]], "one entry for each turn"), ([[[], []]], "one token")],
)
def test_values_that_do_not_fit_are_refused(episode, values, said):
    with pytest.raises(ValueError, match=said):
        V0()([episode([None] * 2, [0.0, 1.0])], values=values)


@pytest.mark.parametrize("prior", [-1.0, float("nan"), float("inf")])
def test_a_prior_outside_its_range_is_refused(prior):
    with pytest.raises(ValueError, match="prior"):
        V0(prior=prior)
