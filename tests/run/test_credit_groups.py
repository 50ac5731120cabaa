"""What a credit is given of an iteration's episodes, and what it must return."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.data.group_account import BINS, counts_of
from perturn.errors import ConfigError
from perturn.run.stages.credit_stage import credit_groups
from perturn.run.stages.group_stage import _say, _warn_of_missing_states
from perturn.types import Status, failed
from support.credited import EPISODES, episode

from .own_credits import Across, Flat, Own, Short, Wrong


def test_a_credit_is_asked_for_one_task_at_a_time_unless_it_looks_across():
    """By task and sample, whatever the order of the episodes."""
    Own.calls = []
    credit_groups(EPISODES, Own(), failures="zero")
    tasks = [
        [key for key in sorted(one.key for one in EPISODES) if key[0] == task]
        for task in ("even", "one", "two")
    ]
    assert Own.calls == tasks

    Across.calls = []
    rows = credit_groups(EPISODES, Across(2.0), failures="zero")
    assert Across.calls == [[key for keys in tasks for key in keys]]
    assert {row.key: row.weight for row in rows}["one", 1] == (3.0,) * 3


def test_what_a_credit_needs_stays_with_its_trajectory():
    """Given in the order of the episodes, read in the order of the groups."""

    class Echo(Own):
        def __call__(self, group, *, given):
            return given

    given = [torch.full((len(one.turns),), float(i + 1)) for i, one in enumerate(EPISODES)]

    rows = credit_groups(EPISODES, Echo(), {"given": given}, failures="zero")

    assert {row.key: row.weight for row in rows} == {
        one.key: (i + 1.0,) * len(one.turns) for i, one in enumerate(EPISODES)
    }


def test_reinforce_whitens_over_all_tasks_of_an_iteration():
    """Scores 0 0 / 1 0 0 / 1 1 over three tasks have one mean and one deviation."""
    rows = credit_groups(EPISODES, CREDITS["reinforce++"](), failures="zero")

    ordered = sorted(EPISODES, key=lambda one: one.key)
    expected = CREDITS["reinforce++"]()(ordered)
    for row, weights in zip(rows, expected, strict=True):
        assert_close(torch.tensor(row.weight, dtype=torch.float64), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (Wrong(), r"credit Wrong cannot weigh the 2 trajectories of task 'even': KeyError: 'state'"),
        (Short(), r"credit Short must return one tensor per trajectory, .* for 2 trajectories it returned 1"),
        (Flat(), r"credit Flat must return one tensor per trajectory, .* the 2 turns of task 'one'"),
    ],
)
def test_a_credit_of_somebodys_that_fails_is_named(credit, message):
    with pytest.raises(ConfigError, match=message):
        credit_groups(EPISODES, credit)


PLAIN = sorted(
    name for name in CREDITS if not CREDITS[name].needs and name not in ("first-error", "process-score")
)
"""Credits that read nothing but the episodes; the two read the remaining path, which is not measured here."""


@pytest.mark.parametrize("name", PLAIN)
def test_every_credit_weighs_a_group_as_if_what_failed_had_not_been_played(name):
    """And what FAILED has weights of 0, whatever it earned."""
    kept = [one for one in EPISODES if not failed(one)]
    credit = CREDITS[name]()

    found = {row.key: row for row in credit_groups(EPISODES, credit)}
    alone = {row.key: row for row in credit_groups(kept, credit)}

    assert {key: row for key, row in found.items() if key in alone} == alone
    assert [(row.bin, row.weight) for key, row in found.items() if key not in alone] == [("failed", (0.0,))]


def test_three_successes_beside_a_crash_are_not_pushed_up():
    """Group mean 1 of the three that count: 0 each. With score 0 for the crash the mean is 3/4."""
    group = [episode("t", sample, [1.0]) for sample in range(3)]
    group.append(episode("t", 3, [1.0], status=Status.FAILED, error="crash"))

    rows = credit_groups(group, CREDITS["grpo"](normalize="mean"))
    zero = credit_groups(group, CREDITS["grpo"](normalize="mean"), failures="zero")

    assert [(row.bin, row.weight) for row in rows] == [("no_spread", (0.0,))] * 3 + [("failed", (0.0,))]
    assert [(row.bin, row.weight) for row in zero] == [("trained", (0.25,))] * 3 + [("failed", (-0.75,))]


@pytest.mark.parametrize("trained", [0, 2])
def test_episodes_and_groups_are_counted_in_lines_of_their_own(capsys, trained):
    """With advice if nothing can be learned."""
    bins = dict.fromkeys(BINS, 0) | {"trained": trained, "no_spread": 4 - trained}
    groups = {
        "groups": 2,
        "alone": 0,
        "equal_outcomes": 1,
        "zero_credit": 2 - trained // 2,
        "lag_most": trained,
    }

    _say({"asked": 4} | bins | groups)

    said = " ".join(capsys.readouterr().err.split())
    if trained:
        assert said == (
            "episodes: 4, of which 2 trained on, 2 in groups with all weights 0 "
            "groups: 2, of which 1 with equal outcomes, 1 with all weights 0 also: lag most 2"
        )
    else:
        assert "no episode of a task did better than another. Increase explore.samples" in said


def test_a_group_of_which_one_is_left_has_no_baseline():
    """Whatever it earned: it is counted under no spread, and in `alone`."""
    group = [episode("t", 0, [1.0]), episode("t", 1, [0.0], status=Status.FAILED, error="crash")]

    rows = credit_groups(group, CREDITS["rloo"]())

    assert [row.bin for row in rows] == ["no_spread", "failed"]
    assert counts_of([group], rows)["alone"] == 1


def test_what_a_credit_needs_is_given_of_those_that_count():
    """In the order of the episodes, without the one that FAILED."""

    class Echo(Own):
        def __call__(self, group, *, given):
            return given

    kept = [one for one in EPISODES if not failed(one)]
    given = [torch.full((len(one.turns),), float(i + 1)) for i, one in enumerate(kept)]

    rows = credit_groups(EPISODES, Echo(), {"given": given})

    weights = {row.key: row.weight for row in rows}
    assert [weights[one.key] for one in kept] == [(i + 1.0,) * len(one.turns) for i, one in enumerate(kept)]


@pytest.mark.parametrize(("failures", "expected"), [("leave_out", -0.28125), ("zero", -0.24375)])
def test_the_bias_of_both_ways_is_what_the_docs_say(failures, expected):
    """Two actions of probability 1/2: A pays 0.4; B pays 1, or its episode FAILED, half of the time each.

    By the logit of A, f = E[S, 0 where FAILED] = 0.45 has the gradient -0.1/4, and the share g = 3/4 of those that did
    not FAIL 0.5/4. All groups of three are enumerated, with the trained weights of RLOO times the gradient of the log-
    probability. leave_out: 3 g (1 - 1/16) times the gradient of f/g, where 1/16 is the chance that both others FAILED.
    zero: 3 times the gradient of f less f times that of g. Neither is 3 times that of f, -0.075.
    """
    outcomes = [(0.5, 0.5, 0.4, False), (0.25, -0.5, 1.0, False), (0.25, -0.5, 0.0, True)]
    total = 0.0
    for group in product(outcomes, repeat=3):
        played = [
            episode("t", i, [score], status=Status.FAILED if fails else Status.COMPLETED)
            for i, (_, _, score, fails) in enumerate(group)
        ]
        rows = credit_groups(played, CREDITS["rloo"](), failures=failures)
        trained = sum(
            row.weight[0] * gradient
            for row, (_, gradient, _, _) in zip(rows, group, strict=True)
            if row.bin == "trained"
        )
        total += prod(chance for chance, *_ in group) * trained

    assert total == pytest.approx(expected, abs=1e-12)


def test_quantities_that_count_other_episodes_are_refused():
    """Or each would be read as another episode's."""
    given = [torch.ones(len(one.turns)) for one in EPISODES]

    with pytest.raises(
        ConfigError, match=r"values must have one entry for each of the 6 trajectories .* got 7"
    ):
        credit_groups(EPISODES, Own(), {"values": given})


def with_states(one, keys):
    turns = [replace(turn, state_key=key) for turn, key in zip(one.turns, keys, strict=True)]
    return replace(one, turns=tuple(turns))


def test_credits_that_compare_states_say_so():
    """They weigh turns otherwise if the turns have state keys."""
    rewards, keys = ([0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]), ("abc", "abd", "bac")
    keyed = [episode("t", n, *each) for n, each in enumerate(zip(rewards, keys, strict=True))]
    plain = [with_states(one, [None] * 3) for one in keyed]
    credits = {name: kind() for name, kind in CREDITS.items()}
    alone = {name: credit for name, credit in credits.items() if not credit.needs}

    differ = {
        name
        for name, credit in alone.items()
        if [each.tolist() for each in credit(plain)] != [each.tolist() for each in credit(keyed)]
    }

    assert differ == {name for name, credit in alone.items() if credit.traits.compares_states}
    assert {"anchor-rloo", "gigpo", "graphgpo"} <= differ


def test_turns_without_a_state_key_are_told(capsys):
    one = episode("t", 0, [0.0, 0.0, 1.0])

    _warn_of_missing_states("gigpo", [with_states(one, [None] * 3), with_states(one, ["a", "b", None])])
    _warn_of_missing_states("gigpo", [with_states(one, "abc")])

    said = " ".join(capsys.readouterr().err.split())
    assert "4 of 6 trained turns have no state key, so gigpo compares them with no other turn." in said
    assert said.count("trained turns") == 1
