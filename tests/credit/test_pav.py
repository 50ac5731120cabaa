"""PAV: the outcome, and progress under a prover between turns from which episodes were played on."""

from dataclasses import dataclass
from fractions import Fraction
from math import nan
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Return
from perturn.credit_check.meter import SIZES, check_credit, measure
from perturn.credit_check.processes import PROCESSES
from perturn.methods.pav import PAV
from perturn.methods.spo import SPO

RLOO = CREDITS["rloo"]


def test_hand_worked(episode):
    """Scores 1 and 0, alpha 1/2; first segments come to 1/4 and 0.

    The first: 1 + (1/4 - 0) / 2 over turns 0 and 1, 1 + (3/4 - 1/4) / 2 at 2, and 1 + (1 - 3/4) / 2 at 3. The other:
    -1 + (0 - 1/4) / 2.
    """
    group = [episode([None] * 4, [0.0, 0.0, 0.0, 1.0]), episode([None], [0.0], sample=1)]

    first, other = PAV(alpha=0.5)(group, branch_returns=[[nan, nan, 0.25, 0.75], [nan]])

    assert_close(first, torch.tensor([1.125, 1.125, 1.25, 1.125], dtype=torch.float64), rtol=0, atol=0)
    assert other.tolist() == [-1.125]


def test_a_value_before_the_first_turn_is_not_read(episode):
    group = [episode([None] * 2, [0.0, 1.0]), episode([None] * 2, [0.0, 0.0], sample=1)]

    one, other = (PAV()(group, branch_returns=[[known, 0.5], [known, 0.25]]) for known in (nan, 9.0))

    assert [each.tolist() for each in one] == [each.tolist() for each in other]


def test_an_invalid_turn_costs_its_segment_and_its_score(episode):
    """Scores 7/8 and 0; first segments -1/8 + 1/2 and 0: 7/8 + 3/8, and then 7/8 + 1 - 1/2."""
    group = [episode([None] * 2, [0.0, 1.0], valid=[False, True]), episode([None], [0.0], sample=1)]

    found = PAV(returns=Return(invalid_penalty=0.125))(group, branch_returns=[[nan, 0.5], [nan]])

    assert found[0].tolist() == [1.25, 1.375]


NUMBER = st.integers(-8, 8).map(lambda n: n / 4)
ROWS = st.lists(st.tuples(NUMBER, st.one_of(st.just(nan), NUMBER)), min_size=1, max_size=5)
GROUP = st.lists(ROWS, min_size=2, max_size=4)


def of_rows(rows, episode):
    """The trajectories of some rows, and the values."""
    group = [episode([None] * len(own), [r for r, _ in own], sample=i) for i, own in enumerate(rows)]
    return group, [[value for _, value in own] for own in rows]


@given(rows=GROUP)
def test_without_alpha_it_is_rloo(rows, episode):
    """Whatever the prover says."""
    group, branches = of_rows(rows, episode)

    for one, other in zip(PAV(alpha=0.0)(group, branch_returns=branches), RLOO()(group), strict=True):
        assert_close(one, other, rtol=0, atol=1e-12)


@given(rows=GROUP, alpha=st.integers(0, 12).map(lambda n: n / 4))
def test_behind_the_first_segment_progress_is_that_of_spo(rows, alpha, episode):
    """There it adds alpha times SPO's advantage to RLOO's."""
    group, branches = of_rows(rows, episode)
    found, outcome = PAV(alpha=alpha)(group, branch_returns=branches), RLOO()(group)
    for of_one, score, progress, known in zip(
        found, outcome, SPO()(group, branch_returns=branches), branches, strict=True
    ):
        first = next((t for t in range(1, len(known)) if known[t] == known[t]), len(known))

        assert_close(of_one[first:], (score + alpha * progress)[first:], rtol=0, atol=1e-12)


@given(rows=GROUP)
def test_it_is_what_fractions_say(rows, episode):
    """An independent way: each turn looks for both ends of its segment by itself, and the first ones are compared."""
    group, branches = of_rows(rows, episode)
    found = PAV(alpha=2.0)(group, branch_returns=branches)
    rewards = [[Fraction(r) for r, _ in own] for own in rows]
    scores = [sum(own) for own in rewards]

    def reached(i, turn):
        known = {t: Fraction(v) for t, v in enumerate(branches[i]) if t and v == v} | {len(rows[i]): 0}
        end = min(t for t in known if t > turn)
        return sum(rewards[i][turn:end]) + known[end]

    for i, of_one in enumerate(found):
        others = [j for j in range(len(rows)) if j != i]
        for t, weight in enumerate(of_one.tolist()):
            begin = max(k for k in range(t + 1) if k == 0 or branches[i][k] == branches[i][k])
            start = (
                Fraction(branches[i][begin]) if begin else sum(reached(j, 0) for j in others) / len(others)
            )
            outcome = scores[i] - sum(scores[j] for j in others) / Fraction(len(others))

            assert weight == pytest.approx(float(outcome + 2 * (reached(i, begin) - start)), abs=1e-12)


def test_without_branches_it_is_rloo_with_a_factor(episode):
    """The one segment of each is the whole trajectory."""
    group = [episode([None] * n, [0.0] * (n - 1) + [s], sample=n) for n, s in ((1, 2.0), (2, 0.0), (3, 1.0))]

    found = PAV(alpha=0.5)(group, branch_returns=[[nan] * len(one.turns) for one in group])

    for one, other in zip(found, RLOO()(group), strict=True):
        assert_close(one, 1.5 * other, rtol=0, atol=1e-12)


def test_a_trajectory_alone_has_nothing_to_compare_with(episode):
    assert PAV()([episode([None] * 2, [0.0, 1.0])], branch_returns=[[nan, 0.5]])[0].tolist() == [0.0, 0.0]


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
        PAV()([episode([None] * 2, [0.0, 1.0])], branch_returns=branches)


@pytest.mark.parametrize("alpha", [-0.5, nan])
def test_a_weight_that_is_none_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        PAV(alpha=alpha)


@dataclass(frozen=True)
class OwnProver(PAV):
    """With the values of the policy that acts."""

    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)


@dataclass(frozen=True)
class Seldom(OwnProver):
    """The same, played on from every second turn."""

    def __call__(self, group, *, branch_returns, **_):
        """Leave out the others' values."""
        kept = [
            [v if t % 2 == 0 else nan for t, v in enumerate(of_one.tolist())] for of_one in branch_returns
        ]
        return super().__call__(group, branch_returns=kept)


@pytest.mark.parametrize("credit", [OwnProver, Seldom])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 3.0])
def test_with_the_policy_itself_as_prover_the_gradient_is_longer_and_not_bent(credit, alpha):
    """Exact values: E[g] is (1 + alpha) times the true gradient, on every process and size."""
    for one in check_credit(credit(alpha=alpha)):
        assert one.relative_bias <= 1e-9
        assert one.scale == pytest.approx(1 + alpha, abs=1e-9)


def test_another_prover_bends_the_gradient():
    """By more with more weight on it."""
    fork = PROCESSES[2]
    some, more = (measure(PAV(alpha=alpha), fork, 3).relative_bias for alpha in (0.5, 3.0))

    assert 0.01 < some < more


@pytest.mark.parametrize("process", PROCESSES, ids=lambda one: one.name)
@pytest.mark.parametrize("size", SIZES)
def test_the_baseline_of_the_first_segment_bends_nothing(process, size):
    """E[g] is that with the exact V_0 of the prover, for it depends on no action of the trajectory itself."""

    @dataclass(frozen=True)
    class Exact(PAV):
        """V_0 of the prover in the stead of the group's."""

        def __call__(self, group, *, branch_returns, **_):
            """A = RLOO's + r + V(next) - V."""
            found = []
            for outcome, one, values in zip(RLOO()(group), group, branch_returns, strict=True):
                rewards = torch.tensor([turn.reward for turn in one.turns], dtype=torch.float64)
                found.append(outcome + rewards + torch.cat([values[1:], values.new_zeros(1)]) - values)
            return found

    ours, exact = measure(PAV(), process, size), measure(Exact(), process, size)

    for name in ("cosine", "scale", "relative_bias"):
        assert getattr(ours, name) == pytest.approx(getattr(exact, name), abs=1e-9)
