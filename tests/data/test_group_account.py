"""Groups, their ledger, and the file of a credit."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.data.group_account import BINS, CreditRow, counts_of, ledger, read_credits, write_credits
from perturn.errors import DataError
from perturn.group import groups_of, has_equal_outcomes
from perturn.types import Action, Status, Task, Trajectory, Turn


def episode(task, sample, total=0.0, *, turns=1, success=None, fails=False):
    """An episode of so many turns."""
    return Trajectory(
        Task(task),
        (Turn((), Action("go")),) * turns,
        total_reward=total,
        success=total > 0 if success is None else success,
        status=Status.FAILED if fails else Status.COMPLETED,
        sample=sample,
    )


def bins(groups, weights, drop_equal_outcomes=False):
    """The bin of each episode in order."""
    return [row.bin for row in ledger(groups, weights, drop_equal_outcomes=drop_equal_outcomes)]


def test_groups_are_made_by_task_whatever_the_order_of_the_episodes():
    one, two, other = episode("b", 0), episode("b", 1), episode("a", 0)

    assert [list(group) for group in groups_of([two, other, one])] == [[other], [one, two]]
    assert [group.indices for group in groups_of([two, other, one])] == [(1,), (2, 0)]


def test_a_group_is_of_one_task_and_one_policy():
    """It is a sequence of its trajectories, with what they share and what they earned."""
    one, failed, other = episode("a", 0, 1.0), episode("a", 1, 2.0, fails=True), episode("a", 0, 0.5)
    branch = replace(episode("a", 2), origin=0)
    first, second = groups_of([one, replace(other, policy="other"), failed, branch])

    assert (first.task, first.policy, second.policy) == (one.task, one.policy, "other")
    assert (first.rewards, second.rewards) == ((1.0, 0.0, 0.0), (0.5,))
    assert (len(first), first[0], list(first[1:]), first.branches) == (3, one, [failed, branch], (branch,))


def test_an_episode_that_failed_is_left_out_and_its_group_trains():
    """It counted with score 0: the other is 1 above it."""
    group = [episode("a", 0, 1.0, turns=2), episode("a", 1, fails=True)]

    rows = ledger([group], [[[0.5, 0.5], [-0.5]]], drop_equal_outcomes=False)

    assert rows == [CreditRow("a", 0, "trained", (0.5, 0.5)), CreditRow("a", 1, "failed", (-0.5,))]


def test_a_group_without_spread_is_left_out():
    """Rounding is no spread: 0.1 three times has a mean of 0.1 plus 1e-17. One that failed is said to have failed."""
    equal = [episode("a", 0), episode("a", 1), episode("a", 2, fails=True)]

    assert bins([equal], [[[0.0], [1e-17], [0.0]]]) == ["no_spread", "no_spread", "failed"]


def test_an_episode_alone_in_its_task_is_trained_if_anything_weighs_it():
    """As values do. It has nobody to be equal to, so equal outcomes leave it alone."""
    assert bins([[episode("b", 0, 1.0)]] * 2, [[[0.0]], [[1.0]]]) == ["no_spread", "trained"]
    assert bins([[episode("b", 0, 1.0)]], [[[1.0]]], drop_equal_outcomes=True) == ["trained"]


def test_outcomes_that_are_not_known_are_not_equal():
    group = [episode("a", 0), episode("a", 1)]

    assert has_equal_outcomes(group)
    assert not has_equal_outcomes([group[0], replace(group[1], status=Status.UNFINISHED)])


def test_a_weight_of_0_in_a_group_with_spread_is_trained_and_an_episode_without_turns_is_not():
    group = [episode("a", 0, 1.0), episode("a", 1, 0.5), episode("a", 2), episode("a", 3, turns=0)]

    assert bins([group], [[[0.5], [0.0], [-0.5], []]]) == ["trained", "trained", "trained", "no_spread"]


def test_groups_of_equal_outcomes_are_filtered_by_request_alone():
    """Returns with a penalty per turn differ where outcomes do not; a score without a success is another outcome."""
    same = [episode("a", 0, 0.3), episode("a", 1, 0.1 + 0.2)]
    other = [episode("b", 0, 0.3), episode("b", 1, 0.3, success=False)]
    weights = [[[0.1], [-0.1]]] * 2

    assert bins([same, other], weights) == ["trained"] * 4
    assert bins([same, other], weights, drop_equal_outcomes=True) == [*["filtered"] * 2, *["trained"] * 2]


@pytest.mark.parametrize(("failures", "alone", "both"), [("zero", 1, 2), ("leave_out", 2, 1)])
def test_equal_outcomes_and_zero_credit_are_counted_separately(failures, alone, both):
    """Four groups of two: neither, equal outcomes, zero credit, both; and a task with one episode.

    The episode beside a FAILED one is alone where that is left out.
    """
    groups = [
        [episode("a", 0, 1.0), episode("a", 1)],
        [episode("b", 0), episode("b", 1)],
        [episode("c", 0, 1.0), episode("c", 1)],
        [episode("d", 0), episode("d", 1, fails=True)],
        [episode("e", 0, 1.0)],
    ]
    weights = [[[0.5], [-0.5]], [[0.1], [-0.1]], [[0.0], [0.0]], [[0.0], [0.0]], [[0.0]]]

    rows = ledger(groups, weights, drop_equal_outcomes=True, failures=failures)

    assert counts_of(groups, rows, failures) == {
        "asked": 9,
        "trained": 2,
        "no_spread": 4,
        "failed": 1,
        "stale": 0,
        "cut": 0,
        "filtered": 2,
        "groups": 5,
        "alone": alone,
        "equal_outcomes": both,
        "zero_credit": both,
    }


@given(
    st.lists(st.lists(st.tuples(st.sampled_from([0.0, 0.5]), st.booleans(), st.booleans()), min_size=1)),
    st.booleans(),
)
def test_the_bins_sum_to_what_was_asked(drawn, drop):
    """Whatever fails, and whatever the credit says."""
    groups = [
        [episode(f"{g}", i, total, fails=fails) for i, (total, fails, _) in enumerate(group)]
        for g, group in enumerate(drawn)
    ]
    weights = [[[float(weighs)] for *_, weighs in group] for group in drawn]

    counts = counts_of(groups, ledger(groups, weights, drop_equal_outcomes=drop))

    assert sum(counts[name] for name in BINS) == counts["asked"] == sum(map(len, groups))
    assert counts["failed"] == sum(fails for group in drawn for _, fails, _ in group)


@pytest.mark.parametrize("weight", [[0.5], [0.5, 0.5, 0.5], [0.5, float("nan")]])
def test_a_weight_that_is_none_is_refused(weight):
    group = [episode("a", 0, turns=2), episode("a", 1)]

    with pytest.raises(
        DataError, match=r"task 'a', sample 0: expected of the credit a finite weight .* 2 turns"
    ):
        ledger([group], [[weight, [0.0]]], drop_equal_outcomes=False)


@given(
    st.lists(
        st.builds(
            CreditRow,
            st.text(max_size=5),
            st.integers(0, 5),
            st.sampled_from(BINS),
            st.lists(st.floats(-1e150, 1e150), max_size=3).map(tuple),
        ),
        unique_by=lambda row: row.key,
        max_size=4,
    )
)
def test_rows_come_back_from_their_file(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("credits") / "credits.jsonl"

    assert write_credits(file, rows) == len(rows)
    assert read_credits(file) == rows


def test_a_file_holds_what_others_may_read(tmp_path):
    """The names on a line are a contract."""
    file = tmp_path / "credits" / "rloo-003.jsonl"
    write_credits(file, [CreditRow("plant/1", 2, "trained", (0.5, -1.0))])

    line = {"task": "plant/1", "sample": 2, "bin": "trained", "weight": [0.5, -1.0]}
    assert [json.loads(each) for each in file.read_text().splitlines()] == [line]


def test_factors_on_clip_ranges_come_back_and_lines_without_them_are_as_before(tmp_path):
    """The key is there where a credit gave some; a file of before has none, and is read."""
    rows = [CreditRow("a", 0, "trained", (0.5, -1.0), (1.3, 0.7)), CreditRow("a", 1, "trained", (1.0,))]
    file, before = tmp_path / "c", tmp_path / "b"
    write_credits(file, rows)
    before.write_text(json.dumps(ROW) + "\n")

    assert [list(json.loads(line)) for line in file.read_text().splitlines()] == [
        ["task", "sample", "bin", "weight", "clip"],
        ["task", "sample", "bin", "weight"],
    ]
    assert read_credits(file) == rows
    assert read_credits(before) == [CreditRow("a", 0, "trained", (1.0,), None)]


ROW = {"task": "a", "sample": 0, "bin": "trained", "weight": [1.0]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps(ROW | {"bin": "lost"}), r"c:2: bin: expected one of trained, .*, got 'lost'"),
        (json.dumps(ROW | {"weight": [float("inf")]}), r"c:2: weight\[0\]: expected a finite number"),
        (json.dumps(ROW | {"weight": ["1"]}), r"c:2: weight\[0\]: expected a finite number, got '1'"),
        (json.dumps(ROW | {"clip": [1.0, 1.0]}), r"c:2: clip: expected a number > 0 for each of 1 weights"),
        (json.dumps(ROW | {"clip": [0.0]}), r"c:2: clip: expected a number > 0 for each of 1 weights"),
        (json.dumps(ROW | {"wait": 1}), r"c:2: wait: unknown key\. Did you mean 'weight'\?"),
        (json.dumps({"task": "a"}), r"c:2: sample: expected a value, got no such key"),
        (json.dumps(ROW | {"task": "first"}), r"c:2: task: expected a task and sample not seen before"),
        ('{"task": "a"', r"c:2: expected JSON"),
    ],
)
def test_a_line_that_is_none_is_refused_with_its_place(tmp_path, line, message):
    file = tmp_path / "c"
    file.write_text(json.dumps(ROW | {"task": "first"}) + "\n" + line + "\n")

    with pytest.raises(DataError, match=message):
        read_credits(file)


def test_a_row_that_could_not_be_read_back_is_not_written(tmp_path):
    file = tmp_path / "c"
    write_credits(file, [CreditRow("a", 0, "trained", ())])

    with pytest.raises(DataError, match="bin: expected one of"):
        write_credits(file, [CreditRow("a", 0, "lost", ())])
    with pytest.raises(DataError, match="expected a finite number"):
        write_credits(file, [CreditRow("a", 0, "trained", (float("nan"),))])
    with pytest.raises(DataError, match="clip: expected a number > 0"):
        write_credits(file, [CreditRow("a", 0, "trained", (1.0,), (-1.0,))])
    assert read_credits(file) == [CreditRow("a", 0, "trained", ())]


def test_an_episode_that_does_not_fit_is_cut_and_still_counts_in_its_group():
    """Bins of a group with spread: the one that is too long is cut, the others are trained by the same weights."""
    group = [episode("a", 0, 1.0), episode("a", 1), episode("a", 2)]
    weights = [[0.5], [-0.25], [-0.25]]

    rows = ledger([group], [weights], drop_equal_outcomes=True, too_long={group[1].key})

    assert [row.bin for row in rows] == ["trained", "cut", "trained"]
    assert [list(row.weight) for row in rows] == weights
    assert counts_of([group], rows)["cut"] == 1


def test_an_episode_that_is_left_out_counts_in_its_group_and_its_weight_is_kept():
    """Whether it failed, or does not fit, is said first."""
    group = [episode("a", sample, float(not sample), fails=sample == 3) for sample in range(4)]
    keys = {one.key for one in group[1:]}
    rows = ledger(
        [group],
        [[[1.0], [-0.5], [-0.5], [0.0]]],
        drop_equal_outcomes=False,
        filtered=keys,
        too_long={("a", 2)},
    )

    assert [row.bin for row in rows] == ["trained", "filtered", "cut", "failed"]
    assert rows[1].weight == (-0.5,)


def test_a_stale_episode_is_in_a_bin_of_its_own_unless_it_failed():
    """Whatever its weights, and whether it fits."""
    group = [episode("a", 0, 1.0), episode("a", 1, 0.0), episode("a", 2, fails=True)]
    keys = {one.key for one in group}
    rows = ledger([group], [[[0.5], [-0.5], [0.0]]], drop_equal_outcomes=False, too_long=keys, stale=keys)

    assert [row.bin for row in rows] == ["stale", "stale", "failed"]
