"""MatchTIR's advantages by hand, its identities, its errors, and how biased matches are."""

from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit_check.meter import measure, summary
from perturn.credit_check.processes import PROCESSES, Outcome, Process
from perturn.methods.matchtir.matchtir_credit import ASSIGNMENTS
from perturn.stats.matching import greedy_matches, hard_matches
from perturn.types import Status

QUICK = settings(derandomize=True)
CALLS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=3)
GROUPS = st.lists(
    st.lists(st.tuples(CALLS, st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)
SETTINGS = st.sampled_from(
    [
        {},
        {"singleton": "raw"},
        {"baseline": "others"},
        {"assignment": "soft"},
        {"unmatched_penalty": 0.5, "lam": 1.0},
    ]
)
EPS = 1e-6


def make(episode, rows, task="t"):
    """A group from the calls and the reward of each turn, and its matches."""
    group = [
        episode([None] * len(row), [reward for _, reward in row], task=task, sample=i)
        for i, row in enumerate(rows)
    ]
    return group, [[calls for calls, _ in row] for row in rows]


def weigh(group, matches, **settings_):
    return CREDITS["matchtir"](**settings_)(group, tool_matches=matches)


@pytest.fixture
def pair(episode):
    """Calls that match 1 and 0, then a message that wins; one that matches 0.5, then a message that loses."""
    return make(episode, [[([1.0, 0.0], 0.0), ([], 1.0)], [([0.5], 0.0), ([], 0.0)]])


def test_hand_worked_group(pair):
    """Rewards (.5, 1) and (.5, 0): S = 1.5, .5, mean 1, std 1/sqrt 2, so +-1/sqrt 2.

    G at turn 0 is .5 + .9 and .5, at turn 1 it is 1 and 0: each +-1/sqrt 2 as every pair is, and so are the means.
    """
    found = weigh(*pair)

    assert [one.tolist() for one in found] == [
        [pytest.approx(0.5**0.5, abs=2e-6)] * 2,
        [pytest.approx(-(0.5**0.5), abs=2e-6)] * 2,
    ]


def test_hand_worked_group_over_the_others(episode):
    """Rewards (1, 1), (.5, 0), (0) and lam .5: halves of the sums of two differences.

    S = 2, .5, 0, less the others' mean 1.75, -.5, -1.25. G at turn 0 is 1.5, .5, 0, less the others' mean 1.25, -.25,
    -1; at turn 1 it is 1 and 0: 1 and -1.
    """
    group, matches = make(
        episode, [[([1.0], 0.0), ([], 1.0)], [([1.0, 0.0], 0.0), ([], 0.0)], [([0.0], 0.0)]]
    )

    found = weigh(group, matches, baseline="others", lam=0.5)

    assert [one.tolist() for one in found] == [[1.5, 1.375], [-0.375, -0.75], [-1.125]]


def test_a_call_without_a_match_costs_the_penalty(episode):
    """Mean of 1 and -.5; a turn without calls costs nothing, and a soft assignment knows no penalty."""
    group, matches = make(episode, [[([1.0, 0.0], 0.0), ([0.0], 0.25), ([], 0.0)]])
    rewards = [
        CREDITS["matchtir"](assignment=name, unmatched_penalty=0.5).turn_rewards(group, matches)
        for name in ASSIGNMENTS
    ]

    assert rewards == [[[0.25, -0.25, 0.0]], [[0.25, -0.25, 0.0]], [[0.5, 0.25, 0.0]]]


def released(matches, rewards, lam=0.9):
    """The released code's advantages, by its description: statistics by index, raw where there is but one."""
    r = [
        [(fmean(calls) if calls else 0.0) + reward for calls, reward in zip(*both, strict=True)]
        for both in zip(matches, rewards, strict=True)
    ]
    to_go = [[sum(lam ** (k - t) * one[k] for k in range(t, len(one))) for t in range(len(one))] for one in r]

    def over(value, values):
        return value / (1 + EPS) if len(values) < 2 else (value - fmean(values)) / (stdev(values) + EPS)

    return [
        [
            (over(sum(r[i]), [sum(one) for one in r]) + over(g, [one[t] for one in to_go if len(one) > t]))
            / 2
            for t, g in enumerate(to_go[i])
        ]
        for i in range(len(r))
    ]


@QUICK
@given(rows=GROUPS)
def test_with_raw_singletons_it_is_the_released_codes_advantage(episode, rows):
    """Equal returns differ there by rounding, over 1e-6: less than 1e-8."""
    group, matches = make(episode, rows)

    found = weigh(group, matches, assignment="greedy", singleton="raw")

    for one, expected in zip(found, released(matches, [[r for _, r in row] for row in rows]), strict=True):
        assert_close(one, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)


@QUICK
@given(rows=GROUPS, settings_=SETTINGS, data=st.data())
def test_the_order_of_a_group_changes_no_bit(episode, rows, settings_, data):
    group, matches = make(episode, rows)
    order = data.draw(st.permutations(range(len(rows))))

    found = weigh([group[i] for i in order], [matches[i] for i in order], **settings_)

    for one, i in zip(found, order, strict=True):
        assert torch.equal(one, weigh(group, matches, **settings_)[i])


@QUICK
@given(rows=GROUPS, settings_=SETTINGS)
def test_weights_are_finite_and_one_a_turn(episode, rows, settings_):
    found = weigh(*make(episode, rows), **settings_)

    assert [one.shape for one in found] == [(len(row),) for row in rows]
    assert all(one.dtype == torch.float64 and one.isfinite().all() for one in found)


@QUICK
@given(one=GROUPS, other=GROUPS)
def test_tasks_are_never_compared_with_each_other(episode, one, other):
    here, there = make(episode, one, "here"), make(episode, other, "there")

    found = weigh(here[0] + there[0], here[1] + there[1])

    for both, expected in zip(found, weigh(*here) + weigh(*there), strict=True):
        assert torch.equal(both, expected)


@QUICK
@given(rows=GROUPS)
def test_without_calls_the_trajectorys_part_is_grpos_and_over_the_others_it_is_rloos(episode, rows):
    """A single turn has one return, so that both parts are the same."""
    group, _ = make(episode, [row[-1:] for row in rows])
    none = [[()]] * len(group)

    for found, name in ((weigh(group, none), "grpo"), (weigh(group, none, baseline="others"), "rloo")):
        assert_close(torch.cat(found), torch.cat(CREDITS[name]()(group)), rtol=0, atol=1e-12)


@QUICK
@given(rows=GROUPS)
def test_twice_the_reward_is_twice_the_advantage_over_the_others(episode, rows):
    group, matches = make(episode, rows)
    double, more = make(episode, [[([2 * c for c in calls], 2 * r) for calls, r in row] for row in rows])

    found = weigh(double, more, baseline="others")

    assert_close(
        torch.cat(found), 2 * torch.cat(weigh(group, matches, baseline="others")), rtol=1e-12, atol=1e-12
    )


def test_a_trajectory_alone_gets_nothing_unless_raw_and_neither_does_a_turn_that_no_other_reached(episode):
    """Alone: S = 2, G = 1.9 and 1, means 1.95 and 1.5. Beside a shorter one turn 1 has the trajectory's half."""
    alone = make(episode, [[([1.0], 0.0), ([], 1.0)]])
    uneven = make(episode, [[([1.0], 0.0), ([], 1.0)], [([0.0], 0.0)]])

    assert weigh(*alone)[0].tolist() == [0.0, 0.0]
    assert weigh(*alone, singleton="raw")[0].tolist() == pytest.approx([1.95, 1.5], abs=3e-6)
    assert weigh(*uneven)[0].tolist() == pytest.approx([0.5**0.5, 0.5**1.5], abs=2e-6)
    assert weigh(*uneven, singleton="raw")[0].tolist() == pytest.approx([0.5**0.5, 0.5**1.5 + 0.5], abs=2e-6)


def test_equal_trajectories_get_nothing(episode):
    assert [one.tolist() for one in weigh(*make(episode, [[([0.5], 0.25)] * 2] * 3))] == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("baseline", ["group", "others"])
def test_a_failed_trajectory_counts_with_score_0_and_may_have_no_turns(episode, baseline):
    """Its matches until then are none, nor a penalty."""
    won, other = episode(["a"], [1.0]), episode(["a"], [0.0], sample=1)
    failed = episode(["a"], [5.0], sample=1, status=Status.FAILED)
    empty = episode([], [], sample=2, status=Status.FAILED)
    given_ = {"baseline": baseline, "unmatched_penalty": 0.5}

    found = weigh([won, failed], [[[1.0]], [[1.0, 0.0]]], **given_)

    assert [one.tolist() for one in found] == [
        one.tolist() for one in weigh([won, other], [[[1.0]], [[]]], **given_)
    ]
    assert [len(one) for one in weigh([won, empty], [[[1.0]], []], **given_)] == [1, 0]
    assert [len(one) for one in weigh([empty], [[]], **given_)] == [0]


@pytest.mark.parametrize(
    ("matches", "message"),
    [
        (None, "needs tool_matches="),
        ([[[]]], "one list of calls for each turn"),
        ([[[], []]], "one list of calls for each turn"),
        ([[[], []], [[float("nan")], []]], "finite numbers"),
    ],
)
def test_matches_that_do_not_fit_are_refused(pair, matches, message):
    with pytest.raises(ValueError, match=message):
        weigh(pair[0], matches)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"assignment": "best"}, "assignment must be"),
        ({"baseline": "none"}, "baseline must be"),
        ({"singleton": "one"}, "singleton must be"),
        ({"regularization": 1e-7}, "regularization must be >= 1e-06"),
        ({"unmatched_penalty": 1e7}, "unmatched_penalty must be <= 1000000"),
        ({"unmatched_penalty": -0.5}, "unmatched_penalty must be >= 0"),
        ({"lam": 0.0}, "lam must be > 0"),
        ({"lam": 1.1}, "lam must be <= 1"),
        ({"baseline": "others", "singleton": "raw"}, "singleton raw keeps a score"),
    ],
)
def test_settings_out_of_range_are_refused(given_, message):
    with pytest.raises(ValueError, match=message):
        CREDITS["matchtir"](**given_)


def test_it_does_not_touch_what_it_is_given(pair):
    copy = [replace(one) for one in pair[0]], [[list(turn) for turn in one] for one in pair[1]]

    weigh(*pair)

    assert (pair[0], pair[1]) == copy


def test_the_meter_says_that_no_tool_is_called():
    """And over the others, undiscounted, it is exact on rewards that depend on nothing later."""
    found = summary("matchtir", CREDITS["matchtir"](baseline="others", lam=1.0))

    assert found["needs"] == ["tool-matches"]
    assert found["unbiased"]
    assert not found["claims_unbiased"]


def with_tools(matched):
    """Two calls, each a half match or a whole one of the only gold call; what is matched is known at the end."""
    again = {"half": (Outcome(to=1),), "whole": (Outcome(to=1),)}
    last = {"half": (Outcome(),), "whole": (Outcome(),)}
    process = Process("tools", {0: again, 1: last}, {0: (0.3, -0.2), 1: (0.1, 0.4)}, horizon=2)
    for index, steps in enumerate(process.episodes.steps):
        rewards = matched([[(0.5, 1.0)[step.action]] for step in steps])
        process.episodes.steps[index] = [
            replace(step, reward=r) for step, r in zip(steps, rewards, strict=True)
        ]
    return process


@pytest.mark.parametrize("matched", [hard_matches, greedy_matches])
def test_a_call_that_takes_an_earlier_ones_gold_call_biases_the_turns_part(matched):
    """The second call earns 1 for a whole match; that the first one loses its 1/2 by it, its return does not say.

    The trajectory's part sees both and is exact, by RLOO.
    """
    process = with_tools(matched)

    whole = measure(CREDITS["rloo"](), process, 3)
    both = [
        measure(CREDITS["matchtir"](**given_), process, 3)
        for given_ in ({"baseline": "others", "lam": 1.0}, {"baseline": "others"}, {})
    ]

    assert whole.relative_bias <= 1e-9
    assert [f"{one.relative_bias:.3f}" for one in both] == ["0.170", "0.121", "0.217"]


def test_it_claims_nothing():
    assert not CREDITS["matchtir"]().traits.unbiased
    assert all(measure(CREDITS["matchtir"](), process, 2).cosine > 0 for process in PROCESSES)
