"""Explored episodes by how they ended, as rows of training."""

import tracemalloc
from dataclasses import replace

import pytest

from perturn.config.row_maker_settings import Limit, RowInputs, rows_made
from perturn.data.origins import exchanges_of
from perturn.data.store import read_records, write_records
from perturn.errors import DataError
from perturn.rows import ROWS
from perturn.rows.endings import divide
from perturn.rows.group_pairs import GroupPairs
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


GIVEN = RowInputs(explored=EXPLORED, experts=EXPERTS, sft_episodes=EXPERTS)


def rows_of(name, inputs=GIVEN, **settings):
    return ROWS[name](**settings)(inputs).rows


def test_each_explored_episode_is_counted_once():
    divided = divide(GIVEN, starts_over=True)

    assert divided.counts == {
        **{"taught": 2, "expert": 2, "expert_too_long": 0},
        **{"failed": 1, "no_turns": 1, "too_long": 0, "repeated": 2, "success": 2, "failure": 2},
    }
    assert [one.key for one in divided.successes] == [("a", 1), ("c", 0)]
    assert [one.key for one in divided.failures] == [("b", 0), ("b", 1)]


@pytest.mark.parametrize("name", ["rft", "kto", "nat", "coh"])
def test_an_episode_whose_first_turn_does_not_fit_is_no_row(name):
    """The policy's success of task c, and the expert's episode of task b."""
    limit = Limit(too_long=lambda episodes: {one.key for one in episodes} & {("c", 0), ("b", 0)})
    found = ROWS[name]()(replace(GIVEN, limit=limit))

    assert (found.counts["too_long"], found.counts["expert_too_long"], found.counts["expert"]) == (2, 1, 1)
    assert found.counts["success"] == found.counts["failure"] == 1
    assert "c" not in {row.trajectory.task.id for row in found.rows}


def test_failed_episodes_are_not_compared_with_the_length_limit():
    seen = []
    divide(replace(GIVEN, limit=Limit(too_long=lambda given: seen.extend(given) or set())), starts_over=True)

    assert ("b", 2) in {one.key for one in seen}
    assert ("b", 3) not in {one.key for one in seen}


@pytest.mark.parametrize("name", ["nat", "coh"])
def test_the_text_after_the_task_counts_in_the_length_limit(name):
    """Without the text, all episodes fit."""

    def too_long(episodes):
        return {
            one.key
            for one in episodes
            if one.turns[0].observation[-1]["content"].endswith("not solve the task.")
        }

    found = ROWS[name]()(replace(GIVEN, explored=EXPLORED[:4], limit=Limit(too_long=too_long)))

    assert (found.counts["too_long"], found.counts["failure"], found.counts["success"]) == (1, 0, 1)


@pytest.mark.parametrize("name", ["kto", "nat", "coh", "group-pairs"])
def test_without_rows_the_remedy_for_long_episodes_is_a_longer_limit(name):
    limit = Limit(
        too_long=lambda given: {one.key for one in given}, equal=lambda pairs: [True for _ in pairs]
    )
    played = [replace(episode("a", said, sample=at), total_reward=float(at)) for at, said in enumerate("xy")]
    inputs = replace(GIVEN, explored=played)
    short = rows_made(ROWS[name](), replace(inputs, limit=limit)).remedy

    assert short.startswith("increase model.max_length, ")
    assert "max_length" not in rows_made(ROWS[name](), replace(inputs, explored=played[:1])).remedy


@pytest.mark.parametrize("name", ["rft", "kto", "nat", "coh", "oec"])
def test_an_expert_episode_without_turns_is_no_row(name):
    """There is nothing in it to learn, and nothing that could be told how it ends."""
    empty, bad = episode("a", policy="expert"), episode("a", "south", "up", success=False)
    shown = [empty, EXPERTS[0], EXPERTS[1]]
    inputs = RowInputs([bad], shown, shown, correct=lambda wanted: [replace(bad, success=True, taken_over=1)])
    found = ROWS[name]()(inputs)

    assert found.counts["taught"] == 2
    assert found.rows or name == "kto"
    assert all(row.weight for row in found.rows)


def test_actions_that_are_tool_calls_are_told_apart():
    """All texts are empty, and the calls differ. Their random ids do not count."""

    def calling(name, sample):
        call = {"id": f"call_{sample}", "function": {"name": name}}
        turn = Turn((), Action("", tool_calls=(call,)))
        return Trajectory(Task("a"), (turn,), success=True, sample=sample)

    inputs = RowInputs([calling("look", 0), calling("open", 1), calling("look", 2)])
    divided = divide(inputs, starts_over=True)

    assert divided.counts["success"] == len(divided.successes) == 2
    assert divided.counts["repeated"] == 1


@pytest.mark.parametrize(
    ("name", "counted"), [("rft", "success"), ("nat", "success"), ("coh", "success"), ("kto", "repeated")]
)
def test_a_success_is_repeated_only_where_the_rows_have_the_one_it_repeats(name, counted):
    """On task a the expert does as the policy, but SFT is taught task b alone: only KTO uses the expert's."""
    own, bad = episode("a", "north", "lamp"), episode("a", "south", success=False, sample=1)
    more = episode("c", "up", sample=1)
    found = ROWS[name]()(RowInputs([own, bad, more], EXPERTS, EXPERTS[1:]))

    fates = {key: found.counts[key] for key in ("failed", "no_turns", "repeated", "success", "failure")}
    expected = {"failed": 0, "no_turns": 0, "repeated": 0, "success": 1, "failure": 1}
    assert fates == expected | {counted: expected[counted] + 1}
    good = [row.trajectory for row in found.rows if row.trajectory.success and row.weight[0] > 0]
    assert sum([turn.action.text for turn in one.turns] == ["north", "lamp"] for one in good) == 1


def test_rft_learns_from_the_expert_and_from_own_successes_alike():
    rows = rows_of("rft")

    assert [(row.trajectory.key, row.trajectory.policy, row.weight) for row in rows] == [
        (("a", 0), "expert", (1.0, 1.0)),
        (("b", 0), "expert", (1.0,)),
        (("a", 1), "sft@1", (1.0,)),
        (("c", 0), "sft@1", (1.0, 1.0)),
    ]


def test_kto_learns_from_all_that_is_known_of_explored_tasks():
    """The expert's on tasks that were explored and own successes are desirable, own failures are not."""
    elsewhere = episode("d", "up", policy="expert")
    rows = rows_of("kto", replace(GIVEN, experts=[*EXPERTS, elsewhere], sft_episodes=[elsewhere]))

    assert [(row.trajectory.key, row.trajectory.policy, set(row.weight)) for row in rows] == [
        (("a", 0), "expert", {1.0}),
        (("b", 0), "expert", {1.0}),
        (("a", 1), "sft@1", {1.0}),
        (("c", 0), "sft@1", {1.0}),
        (("b", 0), "sft@1", {-1.0}),
        (("b", 1), "sft@1", {-1.0}),
    ]


@pytest.mark.parametrize(
    ("explored", "experts", "lacks"),
    [
        (EXPLORED[:3], EXPERTS, "none is a failure"),
        (EXPLORED[3:5], [], "none is a success"),
        ([EXPLORED[1], episode("a", "down", success=False)], [], "all are of one task"),
    ],
)
def test_kto_needs_both_labels_and_a_second_task(explored, experts, lacks):
    """Then there is no row to learn from."""
    found = ROWS["kto"]()(RowInputs(explored, experts, EXPERTS))

    assert (found.rows, found.lacks) == ([], lacks)


def first_text(row):
    return row.trajectory.turns[0].observation_text


def test_nat_says_after_the_task_how_each_episode_ends():
    """The rows of RFT, told of success, and own failures, told of failure; all with weight 1, nothing else changed."""
    rows = rows_of("nat", success="Good.", failure="Bad.")

    assert [(row.trajectory.key, first_text(row), set(row.weight)) for row in rows] == [
        *((key, "room 0\nGood.", {1.0}) for key in [("a", 0), ("b", 0), ("a", 1), ("c", 0)]),
        *((key, "room 0\nBad.", {1.0}) for key in [("b", 0), ("b", 1)]),
    ]
    assert rows[0].trajectory.turns[1:] == EXPERTS[0].turns[1:]
    assert rows[0].trajectory.turns[0].action == EXPERTS[0].turns[0].action


@pytest.mark.parametrize("name", ["nat", "coh"])
def test_both_endings_must_be_told_apart(name):
    with pytest.raises(ValueError, match="success and failure must be two texts"):
        ROWS[name](success="a", failure="a")
    assert ROWS[name]()(replace(GIVEN, explored=EXPLORED[:3])).lacks == "none is a failure"


def test_coh_puts_a_failure_before_a_success_of_its_task():
    """Task b has an expert; task e an own success; task f nothing; and of task b one chain does not fit."""
    own = [
        episode("e", "up"),
        episode("e", "down", success=False, sample=1),
        episode("f", "up", success=False),
    ]
    fits = Limit(whole=lambda one: [turn.action.text for turn in one.turns] != ["south", "south", "south"])
    inputs = replace(GIVEN, explored=[*EXPLORED, *own], limit=fits)
    texts = {"success": "Good.", "failure": "Bad."}
    rows = rows_of("coh", inputs, **texts)

    chains = [[(turn.observation_text, turn.action.text) for turn in row.trajectory.turns] for row in rows]
    assert rows[:-4] == rows_of("nat", inputs, **texts)[:-4]
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
    mended = replace(episode("b", "north", "up", "south", policy="expert"), taken_over=2)
    given = replace(GIVEN, correct=lambda wanted: [mended])
    found = ROWS["oec"]()(given)

    assert [row.trajectory for row in found.rows] == [*EXPERTS, mended]
    assert [row.weight for row in found.rows] == [(1.0, 1.0), (1.0,), (0.0, 0.0, 1.0)]
    assert (found.counts["corrections"], found.lacks) == (1, "")
    none = replace(GIVEN, correct=lambda wanted: [replace(mended, success=False)])
    assert ROWS["oec"]()(none).lacks == "no failure could be corrected"
    assert ROWS["oec"]()(replace(none, explored=EXPLORED[:3])).lacks == "none is a failure"


def test_oec_counts_corrections_that_do_not_fit():
    """The expert corrects two of four episodes, and one of them fits; if none fits, it says so."""
    played = [episode("b", *"ab", last, success=False, sample=at) for at, last in enumerate("cd")]
    mended = [
        replace(episode("b", "north", *said, policy="expert"), taken_over=1)
        for said in (("up",), ("up", "south"))
    ]
    limits = [Limit(whole=lambda one, most=most: len(one.turns) <= most) for most in (2, 1)]
    some, none = (
        ROWS["oec"]()(replace(GIVEN, explored=played, limit=limit, correct=lambda wanted: mended))
        for limit in limits
    )

    assert [row.trajectory for row in some.rows] == [*EXPERTS, mended[0]]
    names = ("corrections", "corrections_too_long", "not_corrected")
    assert [some.counts[name] for name in names] == [1, 1, 2]
    assert [none.counts[name] for name in names] == [0, 2, 2]
    assert (none.rows, none.lacks) == ([], "no corrected episode fits the length limit")
    told = rows_made(
        ROWS["oec"](), replace(GIVEN, explored=played, limit=limits[1], correct=lambda wanted: mended)
    )
    assert told.remedy.startswith("increase model.max_length, ")


def test_oec_learns_from_the_corrections_of_earlier_iterations():
    """A row whose first turn has weight 0 is one; those of the iteration come after."""
    old = replace(episode("b", "up", "south", policy="expert"), taken_over=1)
    earlier = [WeightedTrajectory(EXPERTS[1], (1.0,)), WeightedTrajectory(old, (0.0, 1.0))]
    inputs = replace(GIVEN, earlier=earlier, correct=lambda wanted: [])

    assert [row.trajectory for row in rows_of("oec", inputs)] == [*EXPERTS, old]


def test_oec_takes_over_at_turns_after_the_first():
    """One turn of two, drawn by the seed; or those that the policy was least sure of."""
    asked = []
    sure = [-0.1, -0.5, -2.0, -1.0]
    bad = episode("b", "a", "b", "c", "d", success=False)
    turns = [
        replace(turn, action=replace(turn.action, logprobs=(one,), token_ids=(1,)))
        for turn, one in zip(bad.turns, sure, strict=True)
    ]
    inputs = RowInputs(
        [replace(bad, turns=tuple(turns))],
        EXPERTS,
        EXPERTS,
        correct=lambda wanted: asked.extend(wanted) or [],
    )

    ROWS["oec"](takeover="confidence")(inputs)
    assert [turn for _, turn in asked] == [2, 3]
    asked.clear()
    ROWS["oec"](takeovers=9)(inputs)
    assert [turn for _, turn in asked] == [1, 2, 3]
    with pytest.raises(ValueError, match="takeovers must be"):
        ROWS["oec"](takeovers=0)
    with pytest.raises(DataError, match=r"rows\.takeover=confidence reads the log-probabilities"):
        ROWS["oec"](takeover="confidence")(replace(inputs, explored=[bad]))


@pytest.mark.parametrize("name", ["nat", "coh"])
@pytest.mark.parametrize("prompt", [(), ({"role": "system", "content": "Rules."},)])
def test_an_episode_may_begin_with_an_action(name, prompt):
    """The text that says whether it succeeds is then a user message, in a chain of two episodes too."""
    turns = [(Turn((), Action(text)),) for text in ("yes", "no")]
    good, bad = (Trajectory(Task("x"), each, prompt=prompt, success=each is turns[0]) for each in turns)
    rows = rows_of(name, RowInputs([bad], [good], [good]), success="Good.", failure="Bad.")

    texts = [[message["content"] for message in row.trajectory.messages[len(prompt) :]] for row in rows]
    assert texts == [["Good.", "yes"], ["Bad.", "no", *(["Good.", "yes"] if name == "coh" else [])]]
    assert all(row.trajectory.prompt == prompt for row in rows)


def seen(sample, said, reward=0.0, call=None):
    """An episode of one action after an observation, which may be the result of a tool call."""
    heard = {"role": "user", "content": said} | ({"tool_call_id": call} if call else {})
    turns = (Turn((heard,), Action("go")),)
    return Trajectory(Task("a"), turns, sample=sample, total_reward=reward, success=reward > 0)


def test_equal_actions_after_different_observations_are_no_repetition():
    """A random environment shows another start. Ids of tool calls do not count, and an expert's texts do not."""
    explored = [
        seen(0, "left", 1.0),
        seen(1, "right"),
        seen(2, "found", call="x"),
        seen(3, "found", call="y"),
    ]
    groups = [explored[:2], explored[2:]]

    assert divide(RowInputs(explored[:2]), starts_over=True).counts["repeated"] == 0
    assert divide(RowInputs(explored), starts_over=True).counts["repeated"] == 1
    taught = RowInputs(explored, sft_episodes=[seen(0, "else", 1.0)])
    assert divide(taught, starts_over=True).counts["repeated"] == 4
    counts = [GroupPairs()(RowInputs(group)).counts for group in groups]
    assert [(each["kept"], each["identical"]) for each in counts] == [(2, 0), (0, 2)]


def test_ids_of_calls_within_an_observation_do_not_count():
    """An observation can hold an assistant message, such as the call of another agent, and its result."""

    def heard(call):
        calls = [{"id": call, "type": "function", "function": {"name": "f", "arguments": {}}}]
        messages = (
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call, "content": "r"},
        )
        return Trajectory(Task("a"), (Turn(messages, Action("go")),))

    assert exchanges_of(heard("x")) == exchanges_of(heard("y"))


def test_repeated_episodes_are_found_by_digests_of_their_turns():
    """Their texts are not kept: 1000 episodes of 30 turns would take 12 MB."""
    turns = [(Turn(({"role": "user", "content": str(at)},), Action(str(at))),) * 30 for at in range(300)]
    inputs = RowInputs([Trajectory(Task("a"), each, sample=at) for at, each in enumerate(turns)])
    tracemalloc.start()
    divided = divide(inputs, starts_over=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert divided.counts["failure"] == 300
    assert peak < 300 * 2_000
