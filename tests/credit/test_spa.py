"""SPA: rewards that a progress head shares out, and what of an outcome it misses."""

from dataclasses import replace
from fractions import Fraction
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Return
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES
from perturn.methods.spa.spa_credit import Shares, to_go
from perturn.types import Status

SPA = CREDITS["spa"]


def test_hand_worked(episode):
    """Scores 1 and 0 over 3 and 2 turns: 1, 3/4 and 1/4 to go less 0 and -1/2; 0 and -1/2 to go less 1 and 3/4."""
    group = [episode([None] * 3, [0.0, 0.0, 1.0]), episode([None] * 2, [0.0, 0.0], sample=1)]

    first, other = SPA()(group, contributions=[[0.25, 0.5, 0.5], [0.5, 0.0]])

    assert first.tolist() == [1.0, 1.25, 0.25]
    assert other.tolist() == [-1.0, -1.25]


def test_as_the_paper_has_it(episode):
    """No score: 1.25, 1, 0.5 and 0.5, 0 to go; a bonus of 0.5 for two of three turns, and for one of two."""
    group = [
        episode([None] * 3, [0.0, 0.0, 1.0], valid=[True, False, True]),
        episode([None] * 2, [0.0, 0.0], valid=[False, True], sample=1),
    ]

    first, other = SPA(residual=False, grounding=0.5)(group, contributions=[[0.25, 0.5, 0.5], [0.5, 0.0]])

    own, theirs = [2.25, 1.5, 1.0], [1.0, 0.5]
    assert first.tolist() == [2.25 - 1.0, 1.5 - 0.5, 1.0]
    assert other.tolist() == [1.0 - 2.25, 0.5 - 1.5]
    assert to_go([0.25, 0.5, 0.5], 1.25, [0.5, 0.0, 0.5]) == own
    assert to_go([0.5, 0.0], 0.5, [0.0, 0.5]) == theirs


NUMBER = st.integers(-8, 8).map(lambda n: n / 4)
EPISODE = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=5)


@given(
    rows=st.lists(EPISODE, min_size=2, max_size=4), bonus=st.sampled_from([0.0, 0.5]), residual=st.booleans()
)
def test_it_is_what_fractions_say(episode, rows, bonus, residual):
    """An independent way: rewards one by one, and sums of them; at the first turn and by default it is RLOO."""
    group = [
        episode([None] * len(row), [0.0] * (len(row) - 1) + [sum(c for c, _ in row)], sample=i)
        for i, row in enumerate(rows)
    ]
    paid = []
    for row in rows:
        own = [Fraction(x) + Fraction(bonus) for _, x in row]
        own[-1] += (sum(Fraction(c) for c, _ in row) - sum(Fraction(x) for _, x in row)) * residual
        paid.append(own)

    found = SPA(grounding=bonus, residual=residual)(
        group, contributions=[[x for _, x in row] for row in rows]
    )

    for i, one in enumerate(found):
        for t, number in enumerate(one.tolist()):
            others = [sum(own[t:]) for j, own in enumerate(paid) if j != i and len(own) > t]
            expected = sum(paid[i][t:]) - (sum(others) / len(others) if others else 0)
            assert number == pytest.approx(float(expected), abs=1e-12)
        if residual and not bonus:
            assert_close(one[0], CREDITS["rloo"]()(group)[i][0], rtol=0, atol=1e-12)


@given(rows=st.lists(EPISODE, min_size=2, max_size=4), data=st.data())
def test_all_that_is_compared_is_of_one_head(episode, rows, data):
    """That of the trajectory itself; what other heads say changes nothing, nor do turns to come."""
    group = [episode([None] * len(row), [c for c, _ in row], sample=i) for i, row in enumerate(rows)]
    heads = [data.draw(st.integers(0, 2)) for _ in rows]
    tables = [[[x + 3 * head for _, x in row] for head in range(3)] for row in rows]

    found = SPA()(group, contributions=[Shares(each, head) for each, head in zip(tables, heads, strict=True)])

    for i, one in enumerate(found):
        plain = [table[heads[i]] for table in tables]
        assert torch.equal(one, SPA()(group, contributions=plain)[i])
        for t in range(len(one)):
            later = [own if j != i else own[:t] + [9.0] * len(own[t:]) for j, own in enumerate(plain)]
            assert SPA()(group, contributions=later)[i][t] == one[t]


def test_contributions_that_are_right_need_no_residual():
    """What each action earns in the mean: then nothing is missed that an action could change."""

    class Exact:
        needs = ("contributions",)
        traits = CreditTraits()

        def __init__(self, process):
            self.share = process.episodes.value(0, 0, 1.0) / float(
                process.episodes.probability
                @ torch.tensor([float(len(steps)) for steps in process.episodes.steps], dtype=torch.float64)
            )

        def __call__(self, group, *, contributions, **_):
            exact = [[2 * own - self.share for own in of_one] for of_one in contributions]
            return SPA(residual=False)(group, contributions=exact)

    for process in PROCESSES:
        assert measure(Exact(process), process, 3).relative_bias <= 1e-9
        assert measure(SPA(residual=False), process, 3).relative_bias > 0.1


def test_a_penalty_is_shared_out_too(episode):
    """It is part of the score: 1 - 1/4 less 0, and then 3/4 - 1/2."""
    group = [episode([None] * 2, [0.0, 1.0], valid=[False, True]), episode([None], [0.0], sample=1)]

    found = SPA(returns=Return(invalid_penalty=0.25))(group, contributions=[[0.5, 0.0], [0.0]])

    assert found[0].tolist() == [0.75, 0.25]


def test_an_episode_that_failed_has_no_bonus(episode):
    """Nor a score; the turns until then were taken."""
    group = [episode([None], [1.0]), episode([None] * 2, [0.0, 5.0], sample=1)]
    group[1] = replace(group[1], status=Status.FAILED)

    found = SPA(grounding=0.5)(group, contributions=[[0.5], [0.25, 0.25]])

    assert [one.tolist() for one in found] == [[1.5], [-1.5, -0.25]]


def test_it_is_unbiased_at_its_defaults_alone():
    """By what it says; the meter says so too."""
    assert SPA().traits.unbiased
    assert not SPA(grounding=0.1).traits.unbiased
    assert not SPA(residual=False).traits.unbiased


@pytest.mark.parametrize(
    ("contributions", "said"),
    [
        (None, "this credit needs contributions=, what each turn contributed to the score"),
        ([[0.0]], "contributions must hold one entry per turn, for each trajectory"),
        ([[0.0, inf]], "contributions must be finite"),
        ([[0.0, nan]], "contributions must be finite"),
        ([Shares([[0.0, 0.0], [0.0]], 1)], "contributions must hold one entry per turn"),
        ([], "contributions must hold one entry per turn"),
    ],
)
def test_contributions_that_do_not_fit_are_refused(episode, contributions, said):
    with pytest.raises(ValueError, match=said):
        SPA()([episode([None] * 2, [0.0, 1.0])], contributions=contributions)


def test_a_bonus_below_0_is_refused():
    with pytest.raises(ValueError, match=r"grounding must be >= 0, got -0.5"):
        SPA(grounding=-0.5)
