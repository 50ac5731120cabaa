"""ArCHer: Q behind an action less V before it, by the more careful of two critics."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit.protocol import CreditTraits
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES
from perturn.methods.archer.archer_credit import Critics, Critique
from perturn.needs import Needs

ArCHer = CREDITS["archer"]


def test_hand_worked(episode):
    """Turn 0: min(1, 1/2) - min(1/4, 3/4) = 1/4. Turn 1: min(0, 2) - min(1/2, 1/2) = -1/2."""
    group = [episode([None] * 2, [0.0, 1.0]), episode([], [], sample=1)]
    critics = [Critique([[1.0, 0.0], [0.5, 2.0]], [[0.25, 0.5], [0.75, 0.5]]), Critique([[]], [[]])]

    first, empty = ArCHer()(group, critics=critics)

    assert_close(first, torch.tensor([0.25, -0.5], dtype=torch.float64), rtol=0, atol=0)
    assert empty.shape == (0,)


NUMBER = st.integers(-8, 8).map(lambda n: n / 4)
CRITICS = st.integers(1, 3).flatmap(
    lambda n: st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(turns=CRITICS, shift=NUMBER)
def test_it_is_what_sorting_says_and_what_all_critics_add_falls_out(turns, shift):
    """An independent way, turn by turn; a state that all critics rate higher moves no advantage."""
    from support.states import episode as _episode

    group = [_episode([None] * len(turns), [0.0] * len(turns))]
    q, v = ([[pair[side] for pair in own] for own in zip(*turns, strict=True)] for side in (0, 1))
    moved = [[[each + shift for each in own] for own in side] for side in (q, v)]

    (found,) = ArCHer()(group, critics=[Critique(q, v)])
    (other,) = ArCHer()(group, critics=[Critique(*moved)])

    assert found.tolist() == [
        sorted(pair[0] for pair in turn)[0] - sorted(pair[1] for pair in turn)[0] for turn in turns
    ]
    assert_close(other, found, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("critics", "said"),
    [
        (None, "needs critics="),
        ([Critique([[0.0]], [[0.0]])], "Q and V of each turn"),
        ([Critique([[0.0, 1.0]], [[0.0]])], "Q and V of each turn"),
        ([Critique([], [])], "Q and V of each turn"),
        ([Critique([[0.0, float("nan")]], [[0.0, 0.0]])], "must be finite"),
    ],
)
def test_critics_that_do_not_fit_are_refused(episode, critics, said):
    with pytest.raises(ValueError, match=said):
        ArCHer()([episode([None] * 2, [0.0, 1.0])], critics=critics)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gamma": 1.1}, "gamma"),
        ({"tau": 0.0}, "tau"),
        ({"rounds": 0}, "rounds"),
        ({"penalty": 0.0}, "penalty"),
        ({"penalty": 1e-300}, "penalty must be >= 1e-12"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ArCHer(**settings)


@dataclass(frozen=True)
class Bent:
    """ArCHer by critics that are wrong: each is given as (action, error) and adds this to Q of that action."""

    needs: ClassVar[Needs] = (Critics(1.0, 0.1, 1000, 1e-4),)
    traits: ClassVar[CreditTraits] = CreditTraits()

    errors: tuple[tuple[str, float], ...] = ()
    """Of each critic; an action of `all` means each."""
    half: bool = False
    """Whether Q has come only half of the way from V to the truth."""
    states: bool = False
    """Whether V is off by as much as the state's number."""

    def __call__(self, group, *, critics, **_):
        """Errors are added, and ArCHer asked."""
        bent = []
        for one, exact in zip(group, critics, strict=True):
            (q,), (v,) = exact.q, exact.v
            own = [(a + b) / 2 if self.half else a for a, b in zip(q, v, strict=True)]
            wrong = [
                [
                    value + size * (name in ("all", turn.action.text))
                    for value, turn in zip(own, one.turns, strict=True)
                ]
                for name, size in self.errors or (("all", 0.0),)
            ]
            off = [value + self.states * float(t.state_key) for value, t in zip(v, one.turns, strict=True)]
            bent.append(Critique(wrong, [off] * len(wrong)))
        return ArCHer(gamma=1.0)(group, critics=bent)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_exact_critics_give_the_true_gradient(process):
    """At gamma 1; and so do a wrong V, and a Q that is too high everywhere. Half of Q - V is half of the gradient."""
    for credit in (ArCHer(gamma=1.0), Bent(), Bent(states=True), Bent(errors=(("all", 0.5),))):
        found = measure(credit, process, 2)
        assert found.relative_bias <= 1e-9
        assert found.scale == pytest.approx(1, abs=1e-9)
    half = measure(Bent(half=True), process, 2)
    assert half.relative_bias <= 1e-9
    assert half.scale == pytest.approx(0.5, abs=1e-9)


def test_what_a_critic_overrates_bends_the_gradient_and_a_second_one_that_does_not_mends_it():
    """One that adds 0.1 to staying; one that does so beside it to finishing: the smaller of the two is the truth."""
    loop = PROCESSES[0]

    alone = measure(Bent(errors=(("stay", 0.1),)), loop, 3)
    both = measure(Bent(errors=(("stay", 0.1), ("finish", 0.1))), loop, 3)

    assert f"{alone.relative_bias:.3f}" == "0.288"  # docs/notes/archer.md has it
    assert both.relative_bias <= 1e-9


def test_it_never_claims_to_be_unbiased():
    """Learned critics bend the gradient, whatever exact ones do."""
    assert not ArCHer(gamma=1.0).traits.unbiased
