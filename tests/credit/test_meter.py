"""The meter: its table of figures is that of the documentation, and no mistake in a credit gets past it."""

import dataclasses
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from perturn.config.overrides import apply_overrides
from perturn.config.parsing import build
from perturn.credit import CREDITS
from perturn.credit.group_statistics import returns_to_go
from perturn.credit.protocol import CreditTraits
from perturn.credit_check.meter import SIZES, check_credit, measure, summary
from perturn.credit_check.processes import PROCESSES
from perturn.errors import ConfigError
from perturn.needs import Needs, names_of

LOOP, NEUTRAL, FORK, SHARED = PROCESSES
PAGE = Path(__file__).parents[2] / "docs" / "methods" / "bias.md"


def documented():
    """(credit, settings, cells) of each line of the page's table."""
    table = PAGE.read_text().split("<!-- bias -->")[1]
    for line in table.splitlines():
        if line.startswith("| `"):
            name, words, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield name.strip("`"), re.findall(r"`([^`]*)`", words), cells


def made(name, words):
    """The credit of a line."""
    section = {"name": name}
    apply_overrides(section, words)
    return build(CREDITS, section, "credit")


TREES = ("arpo", "portool", "slate")
"""Credits whose groups are trees: their figures on all processes take seconds and are in the slow tier."""


def assert_documented(one, cell):
    """A cell is the relative bias, 0 below 1e-9."""
    if cell == "0":
        assert one.relative_bias <= 1e-9
    elif cell == "wrong sign":
        assert one.cosine < 0
        assert one.relative_bias == float("inf")
    else:
        assert f"{one.relative_bias:.3f}" == cell


@pytest.mark.parametrize(
    ("name", "words", "cells"),
    [
        pytest.param(
            *line, marks=[pytest.mark.slow] if line[0] in TREES else [], id=" ".join([line[0], *line[1]])
        )
        for line in documented()
    ],
)
def test_a_documented_figure_is_the_measured_one(name, words, cells):
    """Groups of three; the last two cells are scale and noise on the loop."""
    credit = made(name, words)

    found = [measure(credit, process, 3) for process in PROCESSES]

    for one, cell in zip(found, cells, strict=False):
        assert_documented(one, cell)
    assert cells[4:] == [f"{found[0].scale:.3f}", f"{found[0].noise:.2f}"]


@pytest.mark.parametrize(
    ("name", "words", "cells"),
    [pytest.param(*line, id=" ".join([line[0], *line[1]])) for line in documented() if line[0] in TREES],
)
def test_a_documented_figure_of_trees_is_the_measured_one_on_the_fork(name, words, cells):
    assert_documented(measure(made(name, words), FORK, 3), cells[PROCESSES.index(FORK)])


def test_every_credit_of_a_group_or_with_values_is_documented():
    """At its defaults, or with settings."""
    read = {name: each() for name, each in CREDITS.items()}
    compared = {
        name
        for name, one in read.items()
        if one.traits.needs_group or {"values", "critics"} & names_of(one.needs)
    }

    assert {name for name, _, _ in documented()} == compared


UNBIASED = [
    pytest.param(name, {}, marks=[pytest.mark.slow] if each().traits.trains_branches else [])
    for name, each in CREDITS.items()
    if each().traits.unbiased
]
"""The credits that claim it at their defaults, whoever added them; to list all trees of a process is slow."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *UNBIASED,
        ("anchor-rloo", {"gamma": 0.9}),
        ("anchor-rloo", {"gamma": 0.0}),
        ("grpo", {"normalize": "mean"}),
        ("progress-advantage", {"alpha": 0.0}),
        ("pav", {"alpha": 0.0}),
        ("v0", {"prior": 2.0}),
    ],
)
def test_what_claims_to_be_unbiased_is(name, settings):
    """At 1e-9 on every process and size; a factor is allowed, and is (N - 1) / N for the group mean."""
    credit = CREDITS[name](**settings)

    assert credit.traits.unbiased
    for one in check_credit(credit):
        assert one.relative_bias <= 1e-9
        assert one.tolerance == 1e-9
        share = 1 - 1 / one.trajectories if name in ("dr-grpo", "grpo") else 1.0
        if settings.get("gamma") == 0 and one.process == "fork":
            share = 0.0  # no first action is rewarded there: both gradients are zero
        assert one.scale == pytest.approx(share, abs=1e-9)


def test_settings_that_bring_a_bias_take_the_claim_back():
    assert len(UNBIASED) >= 11
    assert not CREDITS["rloo"](statistics="steps").traits.unbiased
    assert not CREDITS["trloo"](lam=0.9).traits.unbiased
    assert not CREDITS["turn-gae"](gamma=0.9).traits.unbiased
    for settings in ({"gamma": 0.9}, {"high_level_lam": 0.9}, {"switch": "x"}):
        assert not CREDITS["hiper"](**settings).traits.unbiased


def test_segments_that_begin_with_a_reply_bend_nothing_with_exact_values_and_those_of_an_action_do():
    """Whatever the lambdas, with gamma 1; at lambda 1 as well, if the action decides."""
    words = {"lam": 0.7, "high_level_lam": 0.4}
    for one in check_credit(CREDITS["hiper"](switch="^[13]", **words)):
        assert one.relative_bias <= 1e-9
    by_action = check_credit(CREDITS["hiper"](switch="^[fnt]", by="action"))
    assert {one.process for one in by_action if one.relative_bias > 0.05} == {"loop", "fork", "shared end"}


@dataclass(frozen=True)
class Shaped:
    """Implicit rewards, and those of later turns, without a baseline."""

    needs: ClassVar[Needs] = ("progress", "reference")
    traits: ClassVar[CreditTraits] = CreditTraits()
    later: bool = True

    def __call__(self, group, *, progress, reference):
        """One tensor per trajectory."""
        rewards = [
            [a - b for (a,), (b,) in zip(*both, strict=True)]
            for both in zip(progress, reference, strict=True)
        ]
        return [
            torch.tensor(returns_to_go(of_one, float(self.later)), dtype=torch.float64) for of_one in rewards
        ]


def test_implicit_rewards_are_shaping_where_they_are_summed_to_the_end():
    """Then a potential of the state is all that they differ by from rewards; alone, or standardized, they bend."""
    for one in check_credit(Shaped()):
        assert one.relative_bias <= 1e-9
        assert one.scale == pytest.approx(1.0, abs=1e-9)
    assert measure(Shaped(later=False), FORK, 3).relative_bias > 0.01
    assert measure(CREDITS["oprl"](step_gamma=1.0, normalize="mean"), LOOP, 3).relative_bias > 0.01


def test_a_discounted_credit_is_about_the_discounted_return():
    """Against the undiscounted one it is biased by what the discount costs."""
    credit = CREDITS["anchor-rloo"](gamma=0.9)

    assert measure(credit, LOOP, 2).relative_bias <= 1e-9
    assert measure(credit, LOOP, 2, gamma=1.0).relative_bias > 0.01


@dataclass(frozen=True)
class PerIndex:
    """Return to go, or immediate rewards, less the mean at the same turn index; rewards are summed after that."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits()
    immediate: bool = False

    def __call__(self, group, **_):
        """One tensor per trajectory."""
        rewards = [[turn.reward for turn in each.turns] for each in group]
        values = rewards if self.immediate else [returns_to_go(each, 1.0) for each in rewards]
        at = defaultdict(list)
        for each in values:
            for t, value in enumerate(each):
                at[t].append(value)
        centred = [[value - sum(at[t]) / len(at[t]) for t, value in enumerate(each)] for each in values]
        found = [returns_to_go(each, 1.0) for each in centred] if self.immediate else centred
        return [torch.tensor(each, dtype=torch.float64) for each in found]


@pytest.mark.parametrize(
    ("credit", "loop", "fork"),
    [
        (CREDITS["grpo"](), 0.0, 0.212),
        (CREDITS["grpo"](normalize="mean", statistics="steps"), 0.052, 0.005),
        (CREDITS["rloo"](statistics="steps"), 0.067, 0.006),
        (CREDITS["gigpo"](gamma=1.0, statistics="steps"), 0.052, 0.012),
        (CREDITS["gigpo"](gamma=1.0), 0.026, 0.012),
        (CREDITS["gigpo"](gamma=1.0, statistics="steps", normalize="std"), 0.013, 0.232),
        (PerIndex(), 0.064, 0.024),
        (PerIndex(immediate=True), 0.429, 0.507),
    ],
    ids=str,
)
def test_figures_that_were_known_before(credit, loop, fork):
    """Three digits, groups of three; computed elsewhere from the description of the two processes."""
    assert measure(credit, LOOP, 3).relative_bias == pytest.approx(loop, abs=6e-4)
    assert measure(credit, FORK, 3).relative_bias == pytest.approx(fork, abs=6e-4)


@pytest.mark.parametrize(
    "credit",
    [
        CREDITS["grpo"](normalize="mean", statistics="steps"),
        CREDITS["rloo"](statistics="steps"),
        *(
            CREDITS["gigpo"](gamma=1.0, normalize=normalize, statistics=statistics)
            for normalize in ("mean", "std")
            for statistics in ("trajectories", "steps")
        ),
        PerIndex(),
    ],
    ids=str,
)
def test_a_neutral_bonus_turns_the_sign_of_these(credit):
    """The policy is made worse on average, where RLOO and the anchor are exact."""
    assert measure(credit, NEUTRAL, 3).cosine < 0


@dataclass(frozen=True)
class Planted:
    """The unbiased anchor with a mistake in it."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits(unbiased=True)
    mistake: str = "none"

    def __call__(self, group, **_):
        """One tensor per trajectory."""
        found = CREDITS["anchor-rloo"]()(group)
        if self.mistake == "sign":
            return [-one for one in found]
        if self.mistake == "last turn":
            return [torch.cat([one[:-1], -one[-1:]]) for one in found]
        if self.mistake == "own return":  # the trajectory itself is in its baseline
            return CREDITS["gigpo"](gamma=1.0, omega=1e9)(group)
        if self.mistake == "shift":
            return [torch.cat([one[1:], one[:1]]) for one in found]
        return found


@pytest.mark.parametrize("mistake", ["sign", "last turn", "own return", "shift"])
def test_a_planted_mistake_is_caught(mistake):
    """It claims to be unbiased as before."""
    right, wrong = summary("planted", Planted()), summary("planted", Planted(mistake))

    assert right["unbiased"]
    assert wrong["claims_unbiased"]
    assert not wrong["unbiased"]


def test_a_flipped_sign_is_not_scaled_away():
    """Its direction is exactly the opposite: no positive factor makes up for that."""
    found = measure(Planted("sign"), FORK, 2)

    assert (found.cosine, found.scale) == (pytest.approx(-1), pytest.approx(-1))
    assert found.relative_bias == float("inf")


def test_a_credit_that_does_not_learn_has_no_direction():
    """The expected score is zero, so that the same weight for every turn changes nothing on average."""
    found = measure(CREDITS["uniform"](), LOOP, 2)

    assert (found.cosine, found.scale, found.relative_bias) == (0.0, 0.0, float("inf"))


def test_float32_is_held_to_what_it_can():
    @dataclass(frozen=True)
    class Single:
        needs: ClassVar[Needs] = ()
        traits: ClassVar[CreditTraits] = CreditTraits()

        def __call__(self, group, **_):
            return [one.float() for one in CREDITS["rloo"]()(group)]

    assert all(one.is_unbiased and one.relative_bias > 0 for one in [measure(Single(), SHARED, 3)])


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_the_true_gradient_is_that_of_the_value(process):
    """Central differences of V(0), which is computed by another recursion than the episodes."""
    step, found = 1e-5, []
    for state, logits in process.logits.items():
        for index in range(len(logits)):
            values = []
            for sign in (1, -1):
                moved = [logit + sign * step * (i == index) for i, logit in enumerate(logits)]
                other = dataclasses.replace(process, logits={**process.logits, state: tuple(moved)})
                values.append(other.episodes.value(0, 0, 0.9))
            found.append((values[0] - values[1]) / (2 * step))

    assert process.episodes.gradient(0.9).tolist() == pytest.approx(found, abs=1e-9)
    assert float(process.episodes.probability.sum()) == pytest.approx(1, abs=1e-12)


def test_multisets_are_all_groups():
    """Every group in its order, one by one, for two trajectories of the loop."""
    episodes, credit = LOOP.episodes, CREDITS["gigpo"]()
    expected = torch.zeros(episodes.parameters, dtype=torch.float64)
    square = 0.0
    for group in itertools.product(range(len(episodes.steps)), repeat=2):
        chance = episodes.probability[list(group)].prod()
        weights = credit([episodes.trajectory(episode, i) for i, episode in enumerate(group)])
        gradient = sum(
            weight[t] * episodes.score[episode, t] / 2
            for episode, weight in zip(group, weights, strict=True)
            for t in range(len(weight))
        )
        expected += chance * gradient
        square += float(chance * gradient.square().sum())
    true = episodes.gradient(0.95)

    found = measure(credit, LOOP, 2)

    assert found.cosine == pytest.approx(float(torch.cosine_similarity(expected, true, dim=0)), abs=1e-12)
    length = float(expected.norm())
    assert found.noise == pytest.approx((square - length**2) ** 0.5 / length, abs=1e-9)


def test_what_cannot_be_measured_says_why():
    class Foreign:
        needs = ("mood",)
        traits = CreditTraits()

    with pytest.raises(ConfigError, match="Foreign needs 'mood', and nothing computes it"):
        measure(Foreign(), LOOP, 2)

    class Short:
        needs = ()
        traits = CreditTraits()

        def __call__(self, group, **_):
            return [torch.zeros(1) for _ in group]

    with pytest.raises(
        ConfigError, match=r"credit Short must return one tensor per trajectory, with a finite"
    ):
        measure(Short(), LOOP, 2)

    class Whole(Short):
        def __call__(self, group, **_):
            return [torch.ones(len(one.turns), dtype=torch.long) for one in group]

    with pytest.raises(ConfigError, match=r"Whole must return .* floating-point number .* tensor\(\[1"):
        measure(Whole(), LOOP, 2)


def test_a_summary_is_plain_data():
    found = summary("rloo", CREDITS["rloo"]())

    assert (found["credit"], found["gamma"], found["claims_unbiased"], found["unbiased"]) == (
        "rloo",
        1.0,
        True,
        True,
    )
    assert [(one["process"], one["trajectories"]) for one in found["measurements"]] == [
        (process.name, size) for process in PROCESSES for size in SIZES
    ]
    assert summary("x", Planted("sign"))["measurements"][0]["relative_bias"] is None
