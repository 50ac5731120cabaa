"""Steps of the expert against the policy's own: which give a pair, and which branch is rejected."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.config.row_maker_settings import Limit, RowInputs
from perturn.data.iteration_numbers import ledger_of
from perturn.errors import DataError
from perturn.methods.ipr.step_pairs import STEPS, StepPairs, pair_with_expert_steps
from perturn.rows.pairing import OUTCOMES, pair_with_expert
from perturn.types import Action, Status, Task, Trajectory, Turn

WAY = ("go", "open", "take", "put")


def trajectory(reward, *texts, task="a", **changes):
    turns = tuple(Turn((), Action(text)) for text in texts)
    return Trajectory(Task(task), turns, total_reward=reward, **changes)


def branch(reward, kept, *texts, number=0, task="a", **changes):
    """An episode that begins with so many turns of the expert's."""
    turns = {"sample": number + 1, "taken_over": kept, "origin": 0, **changes}
    return trajectory(reward, *WAY[:kept], *texts, task=task, **turns)


EXPERT = trajectory(1.0, *WAY, policy="expert", success=True)
EXPLORED = [trajectory(0.0, "look"), trajectory(1.0, "go", "run", sample=1)]
BRANCHES = [
    # before turn 1: the policy's other steps are worth 0.5; the expert's, by the branches before turn 2, 2/3
    branch(1.0, 1, "look", number=0),
    branch(0.0, 1, "wait", number=1),
    branch(0.0, 1, "open", "wait", number=2),
    # before turn 2: the other steps are worth (1 + 0 + 0)/3 = 1/3; the expert's, by those before turn 3, 1
    branch(1.0, 2, "look", number=3),
    branch(0.0, 2, "wait", number=4),
    branch(0.0, 2, "run", number=5),
    branch(1.0, 2, "take", "put", number=6),
    branch(1.0, 2, "take", "put", number=7),
    branch(1.0, 2, "take", "put", number=8),
    # before turn 3, the expert's last: all do as he does
    branch(1.0, 3, "put", number=9),
]


def steps(branches, threshold=0.5, expert=EXPERT, **how):
    """(turns that both sides share, sample of the rejected) of each pair, and what became of the steps."""
    pairs, counts = pair_with_expert_steps([expert], [], branches, threshold, **how)
    assert all(pair.chosen == expert for pair in pairs)
    of_steps = {name: count for name, count in counts.items() if count and name.startswith("steps")}
    return [(pair.rejected.taken_over, pair.rejected.sample) for pair in pairs], of_steps


@pytest.mark.parametrize(
    ("threshold", "pairs", "counted"),
    [
        (0.7, [], {"steps_gap": 2, "steps_alike": 1}),
        (2 / 3, [], {"steps_gap": 2, "steps_alike": 1}),  # a gap of rounding above it is none
        (0.5, [(2, 5)], {"steps_kept": 1, "steps_gap": 1, "steps_alike": 1}),
        (0.1, [(1, 2), (2, 5)], {"steps_kept": 2, "steps_alike": 1}),
    ],
)
def test_hand_worked_steps(threshold, pairs, counted):
    """Worth of the expert's steps less that of the policy's: 2/3 - 1/2 = 1/6, then 1 - 1/3 = 2/3; the last is alike.

    Of equal branches that earned least the first is rejected.
    """
    assert steps(BRANCHES, threshold) == (pairs, counted)


def test_the_last_step_is_worth_what_the_expert_earned():
    """1 against 0.4, a gap of 0.6; of the two branches the worse one is rejected."""
    found = [branch(0.8, 3, "look"), branch(0.0, 3, "wait", number=1)]

    assert steps(found, 0.5) == ([(3, 2)], {"steps_kept": 1})
    assert steps(found, 0.6) == ([], {"steps_gap": 1})


def test_a_step_is_as_long_as_the_way_to_the_next_branches():
    """Before turns 0 + 2: a step is two turns; who departs from it in its second took another step."""
    found = [branch(0.0, 2, "take", "look"), branch(1.0, 2, "take", "put", number=1)]

    assert steps(found) == ([(2, 1)], {"steps_kept": 1})


def test_failed_branches_are_left_out():
    """They say nothing of what a turn is worth, however far they came, and none is rejected."""
    lost = branch(0.0, 3, number=0, status=Status.FAILED)
    broken = branch(0.0, 3, "look", number=1, status=Status.FAILED)
    ended = branch(0.5, 3, "wait", number=2)

    assert steps([lost]) == ([], {"steps_failed": 1})
    assert steps([lost, broken]) == ([], {"steps_failed": 1})
    assert steps([lost, ended], 0.5) == ([], {"steps_gap": 1})
    well = branch(1.0, 3, "run", number=3)
    assert steps([lost, ended, well, broken], 0.4) == ([], {"steps_gap": 1})  # 1 - 1.5/2, not 1 - 1.5/3
    assert steps([lost, ended, well, broken], 0.2) == ([(3, 3)], {"steps_kept": 1})
    assert steps([branch(0.0, 2, "look", number=5), lost]) == ([], {"steps_failed": 2})


def test_a_branch_that_earned_as_much_is_not_rejected():
    """The expert's own step is worth 3 by what the policy makes of it, but he himself earned no more than 1."""
    found = [branch(1.0, 2, "look"), branch(3.0, 3, "put", "on", number=1)]

    assert steps(found) == ([], {"steps_gap": 1, "steps_alike": 1})


def test_the_rejected_side_is_cut_to_the_experts_length_and_so_many_turns():
    pairs, counts = pair_with_expert_steps(
        [EXPERT], [], [branch(0.0, 3, *["look"] * 9)], 0.5, max_extra_turns=2
    )

    assert [len(pair.rejected.turns) for pair in pairs] == [6]
    assert (counts["steps_cut"], counts["cut"]) == (1, 0)


def test_whole_episodes_come_first_and_steps_by_task_and_turn():
    """Outcomes are those of `pair_with_expert`; a task without branches has no steps."""
    other = trajectory(1.0, *WAY, task="b", policy="expert")
    found = [branch(0.0, 3, "look", task="b"), branch(0.0, 3, "look"), branch(0.0, 1, "look", number=1)]
    found += [branch(1.0, 2, "take", "put", number=n) for n in (2, 3)]

    pairs, counts = pair_with_expert_steps([other, EXPERT], EXPLORED, reversed(found), 0.5)
    whole, outcomes = pair_with_expert([EXPERT, other], EXPLORED, 0.5)

    assert pairs[: len(whole)] == whole
    shared = [(pair.rejected.task.id, pair.rejected.taken_over) for pair in pairs[len(whole) :]]
    assert shared == [("a", 1), ("a", 3), ("b", 3)]
    assert {name: counts[name] for name in outcomes} == outcomes


@given(
    ends=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from([*WAY, "look"]),
            st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            st.booleans(),
        ),
        max_size=12,
    ),
    threshold=st.sampled_from([0.0, 0.5]),
    backwards=st.booleans(),
)
def test_each_step_has_one_outcome_and_pairs_share_their_first_turns(ends, threshold, backwards):
    """Whatever the order of the branches; both sides part within the step, and the chosen one earned more."""
    found = [
        branch(reward, kept, text, number=number, status=Status.FAILED if fails else Status.COMPLETED)
        for number, (kept, text, reward, fails) in enumerate(ends)
    ]
    pairs, counts = pair_with_expert_steps([EXPERT], EXPLORED, found[::-1] if backwards else found, threshold)

    rows = [pair for pair in pairs if pair.rejected.origin is not None]
    assert sum(counts[name] for name in STEPS) == len({kept for kept, *_ in ends})
    assert (len(rows), len(pairs) - len(rows)) == (counts["steps_kept"], counts["kept"])
    assert sum(counts[name] for name in OUTCOMES) == len(EXPLORED)
    for pair in rows:
        kept = pair.rejected.taken_over
        assert pair.chosen.turns[:kept] == pair.rejected.turns[:kept]
        assert pair.chosen.turns != pair.rejected.turns
        assert pair.chosen.total_reward > pair.rejected.total_reward


def test_a_ledger_counts_the_explored_episodes_alone():
    """Steps are no episodes, so they stand in no bin."""
    _, counts = pair_with_expert_steps([EXPERT], EXPLORED, BRANCHES)
    ledger = ledger_of(counts, len(EXPLORED))

    assert ledger["asked"] == sum(ledger["bins"].values()) == 2
    assert Counter(ledger["bins"]) == Counter(kept=1, tie=1)


def test_branches_of_another_origin_are_refused():
    with pytest.raises(DataError, match="got origin 3"):
        pair_with_expert_steps([EXPERT], [], [branch(0.0, 1, "look", origin=3)])


def test_pairs_that_do_not_differ_within_the_limit_are_left_out():
    """The pair of the step from turn 2, and the pair of whole episodes. A removed pair does not count as cut."""
    limit = Limit(equal=lambda pairs: [True] * len(pairs))
    inputs = RowInputs(EXPLORED, branches=BRANCHES, begun=[EXPERT], limit=limit)
    found = StepPairs(threshold=0.5)(inputs)

    assert found.rows == []
    assert (found.counts["kept"], found.counts["too_long"]) == (0, 1)
    assert (found.counts["steps_kept"], found.counts["steps_too_long"]) == (0, 1)
    long = RowInputs(EXPLORED, branches=[branch(0.0, 3, *["look"] * 9)], begun=[EXPERT], limit=limit)
    counts = StepPairs(threshold=0.5, max_extra_turns=2)(long).counts
    assert (counts["steps_too_long"], counts["steps_cut"]) == (1, 0)


def test_steps_are_compared_with_the_episode_from_which_the_branches_start():
    """Two expert episodes are equally good, and another one comes first in the order of the row maker."""
    other = replace(EXPERT, sample=EXPERT.sample + 7)
    branches = [replace(one, origin=other.sample) for one in BRANCHES]
    found = StepPairs(threshold=0.5)(RowInputs(EXPLORED, [EXPERT, other], branches=branches, begun=[other]))

    assert found.rows
    assert {pair.chosen.sample for pair in found.rows} == {other.sample}


def test_whole_episodes_are_paired_on_tasks_whose_expert_is_not_resumed():
    """An explorer may choose some of the expert's episodes."""
    made = [StepPairs()(RowInputs(EXPLORED, [EXPERT], begun=begun)) for begun in ([EXPERT], [])]

    assert made[0].rows
    assert made[1] == made[0]
