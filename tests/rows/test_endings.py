"""Explored episodes by how they ended, as rows of training."""

from dataclasses import replace

import pytest

from perturn.data.store import read_records, write_records
from perturn.errors import DataError
from perturn.rows.endings import ROWS, coh_rows, divide, kto_rows, lacking, nat_rows, oec_rows, rft_rows
from perturn.settings.outcomes import OUTCOMES, Outcomes
from perturn.types import Action, Status, Task, Trajectory, Turn, WeightedTrajectory


def episode(task, *said, success=True, sample=0, policy="sft@1"):
    turns = [Turn(({"role": "user", "content": f"room {n}"},), Action(text)) for n, text in enumerate(said)]
    return Trajectory(Task(task), tuple(turns), success=success, sample=sample, policy=policy)


EXPERTS = [episode("a", "north", "lamp", policy="expert"), episode("b", "south", policy="expert")]
EXPLORED = [
    episode("a", "north", "lamp"),  # the expert's own actions
    episode("a", "east", sample=1),
    episode("a", "east", sample=2),  # those of sample 1
    episode("b", "north", success=False),
    episode("b", "south", "south", success=False, sample=1),
    episode("b", success=False, sample=2),
    replace(episode("b", "up", sample=3), status=Status.FAILED, error="it broke"),
    episode("c", "north", "lamp"),  # known on another task alone
]


def test_each_explored_episode_is_counted_once():
    divided, counts = divide(EXPERTS, EXPERTS, EXPLORED, OUTCOMES["rft"])

    assert counts == {"failed": 1, "no_turns": 1, "repeated": 2, "success": 2, "failure": 2}
    assert counts.total() == len(EXPLORED)
    assert [one.key for one in divided.successes] == [("a", 1), ("c", 0)]
    assert [one.key for one in divided.failures] == [("b", 0), ("b", 1)]


@pytest.mark.parametrize("name", sorted(ROWS))
def test_an_expert_episode_without_turns_is_no_row(name):
    """There is nothing in it to learn, and nothing that could be told how it ends."""
    empty, bad = episode("a", policy="expert"), episode("a", "south", success=False)
    given = [empty, EXPERTS[0]]
    divided, _ = divide(given, given, [bad], OUTCOMES[name])

    assert divided.taught == divided.experts == EXPERTS[:1]
    assert all(row.weight for row in ROWS[name](divided, Outcomes(name)))


def test_actions_that_are_tool_calls_are_told_apart():
    """All texts are empty, and the calls differ."""

    def calling(name, sample):
        turn = Turn((), Action("", tool_calls=({"function": {"name": name}},)))
        return Trajectory(Task("a"), (turn,), success=True, sample=sample)

    divided, counts = divide(
        [], [], [calling("look", 0), calling("open", 1), calling("look", 2)], OUTCOMES["rft"]
    )

    assert counts["success"] == len(divided.successes) == 2
    assert counts["repeated"] == 1


@pytest.mark.parametrize(
    ("name", "counted"), [("rft", "success"), ("nat", "success"), ("coh", "success"), ("kto", "repeated")]
)
def test_a_success_is_repeated_only_where_the_way_uses_the_one_it_repeats(name, counted):
    """On task a the expert does as the policy, but SFT is taught task b alone: only KTO uses the expert's."""
    own, bad = episode("a", "north", "lamp"), episode("a", "south", success=False, sample=1)
    divided, counts = divide(EXPERTS[1:], EXPERTS, [own, bad], OUTCOMES[name])
    rows = ROWS[name](divided, Outcomes(name))

    assert counts == {"failed": 0, "no_turns": 0, "repeated": 0, "success": 0, "failure": 1} | {counted: 1}
    good = [row.trajectory for row in rows if row.trajectory.success and row.weight[0] > 0]
    assert sum([turn.action.text for turn in one.turns] == ["north", "lamp"] for one in good) == 1


def test_rft_learns_from_the_expert_and_from_own_successes_alike():
    rows = rft_rows(divide(EXPERTS, EXPERTS, EXPLORED, OUTCOMES["rft"])[0], Outcomes("rft"))

    assert [(row.trajectory.key, row.trajectory.policy, row.weight) for row in rows] == [
        (("a", 0), "expert", (1.0, 1.0)),
        (("b", 0), "expert", (1.0,)),
        (("a", 1), "sft@1", (1.0,)),
        (("c", 0), "sft@1", (1.0, 1.0)),
    ]


def test_kto_learns_from_all_that_is_known_of_explored_tasks():
    """The expert's on tasks that were explored and own successes are desirable, own failures are not."""
    elsewhere = episode("d", "up", policy="expert")
    rows = kto_rows(divide([elsewhere], [*EXPERTS, elsewhere], EXPLORED, OUTCOMES["kto"])[0], Outcomes("kto"))

    assert [(row.trajectory.key, row.trajectory.policy, set(row.weight)) for row in rows] == [
        (("a", 0), "expert", {1.0}),
        (("b", 0), "expert", {1.0}),
        (("a", 1), "sft@1", {1.0}),
        (("c", 0), "sft@1", {1.0}),
        (("b", 0), "sft@1", {-1.0}),
        (("b", 1), "sft@1", {-1.0}),
    ]


def first_text(row):
    return row.trajectory.turns[0].observation_text


def test_nat_says_after_the_task_how_each_episode_ends():
    """The rows of RFT, told of success, and own failures, told of failure; all with weight 1, nothing else changed."""
    divided = divide(EXPERTS, EXPERTS, EXPLORED, OUTCOMES["rft"])[0]
    rows = nat_rows(divided, Outcomes("nat", success="Good.", failure="Bad."))

    assert [(row.trajectory.key, first_text(row), set(row.weight)) for row in rows] == [
        *((key, "room 0\nGood.", {1.0}) for key in [("a", 0), ("b", 0), ("a", 1), ("c", 0)]),
        *((key, "room 0\nBad.", {1.0}) for key in [("b", 0), ("b", 1)]),
    ]
    assert rows[0].trajectory.turns[1:] == EXPERTS[0].turns[1:]
    assert rows[0].trajectory.turns[0].action == EXPERTS[0].turns[0].action


def test_coh_puts_a_failure_before_a_success_of_its_task():
    """Task b has an expert; task e an own success; task f nothing; and of task b one chain does not fit."""
    own = [
        episode("e", "up"),
        episode("e", "down", success=False, sample=1),
        episode("f", "up", success=False),
    ]
    divided = replace(
        divide(EXPERTS, EXPERTS, [*EXPLORED, *own], OUTCOMES["coh"])[0],
        fits=lambda one: [turn.action.text for turn in one.turns] != ["south", "south", "south"],
    )
    settings = Outcomes("coh", success="Good.", failure="Bad.")
    rows = coh_rows(divided, settings)

    chains = [[(turn.observation_text, turn.action.text) for turn in row.trajectory.turns] for row in rows]
    assert rows[:-4] == nat_rows(divided, settings)[:-4]
    assert chains[-4:] == [
        [("room 0\nBad.", "north"), ("room 0\nGood.", "south")],
        [("room 0\nBad.", "south"), ("room 1", "south")],
        [("room 0\nBad.", "down"), ("room 0\nGood.", "up")],
        [("room 0\nBad.", "up")],
    ]
    assert all(set(row.weight) == {1.0} and len(row.weight) == len(row.trajectory.turns) for row in rows)


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [WeightedTrajectory(EXPLORED[0], (1.0, -0.5)), WeightedTrajectory(EXPLORED[5], ())]
    rows.append(WeightedTrajectory(EXPLORED[0], (1.0, -0.5), (1.2, 0.8)))

    assert write_records(tmp_path / "rows.jsonl", rows) == 3
    assert list(read_records(tmp_path / "rows.jsonl", WeightedTrajectory)) == rows
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert ['"clip"' in line for line in lines] == [False, False, True]


def test_a_row_with_more_weights_than_turns_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    write_records(file, [WeightedTrajectory(EXPLORED[0], (1.0, 2.0))])
    file.write_text(file.read_text().replace("[1.0,2.0]", "[1.0]"))

    with pytest.raises(DataError, match=r"weight: expected one for each of 2 turns, got 1"):
        list(read_records(file, WeightedTrajectory))

    write_records(file, [WeightedTrajectory(EXPLORED[0], (1.0, 2.0), (1.0, 2.0))])
    file.write_text(file.read_text().replace('"clip":[1.0,2.0]', '"clip":[1.0,0.0]'))

    with pytest.raises(DataError, match=r"clip: expected a number > 0 for each of 2 turns, got"):
        list(read_records(file, WeightedTrajectory))

    write_records(file, [WeightedTrajectory(EXPLORED[0], (0.0, 0.0), has_spread=False)])
    file.write_text(file.read_text().replace("[0.0,0.0]", "[0.0,1.0]"))

    with pytest.raises(DataError, match=r"weight: expected weights of 0 where has_spread is false, got"):
        list(read_records(file, WeightedTrajectory))


def test_oec_learns_the_experts_turns_alone_of_corrections():
    """Of an episode of three turns he has played the last; without one, nothing can be learned of failures."""
    divided, _ = divide(EXPERTS, EXPERTS, EXPLORED, OUTCOMES["oec"])
    mended = replace(episode("b", "north", "up", "south", policy="expert"), taken_over=2)
    rows = oec_rows(replace(divided, corrections=[mended]), Outcomes("oec"))

    assert [row.trajectory for row in rows] == [*EXPERTS, mended]
    assert [row.weight for row in rows] == [(1.0, 1.0), (1.0,), (0.0, 0.0, 1.0)]
    cut = replace(divided, corrections=[mended], fits=lambda one: one is not mended)
    assert [row.trajectory for row in oec_rows(cut, Outcomes("oec"))] == EXPERTS
    assert lacking(divided, OUTCOMES["oec"]) == "no failure could be corrected"
    assert lacking(replace(divided, corrections=[mended]), OUTCOMES["oec"]) == ""
    assert lacking(replace(divided, failures=()), OUTCOMES["oec"]) == "none is a failure"


def test_takeovers_are_of_oec_alone():
    assert Outcomes("oec", takeovers=5).takeovers == 5
    with pytest.raises(ValueError, match="no expert takes over in outcomes rft, so takeovers goes unread"):
        Outcomes("rft", takeovers=5)
    with pytest.raises(ValueError, match="no expert takes over in outcomes nat, so takeover goes unread"):
        Outcomes("nat", takeover="confidence")
    with pytest.raises(ValueError, match="takeovers must be"):
        Outcomes("oec", takeovers=0)
