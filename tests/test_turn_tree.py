"""The turns of an episode as a tree of sequences."""

import json
from dataclasses import replace

import pytest

from perturn.data.records import line_of, parse_line, trajectory_from_dict, trajectory_to_dict
from perturn.errors import DataError
from perturn.types import OPENS, Action, Opening, Task, Trajectory, Turn


def turn(text, **place):
    """A turn that hears and answers a letter."""
    return Turn(({"role": "user", "content": f"hear {text}"},), Action(f"say {text}"), **place)


HELPER = Opening(
    ({"role": "system", "content": "help"},), ({"type": "function"},), {"enable_thinking": False}
)
TREE = Trajectory(
    Task("t/1"),
    (
        turn("a"),
        turn("b"),
        turn("c", follows=OPENS, opening=HELPER),
        turn("d"),
        turn("e", follows=1),
        turn("f", follows=1),
        turn("g", follows=OPENS),
    ),
    prompt=({"role": "system", "content": "do"},),
)


def seen(index):
    """What was said when a turn was taken, by its letters, after the text that opens it."""
    one = TREE.seen_from(index)
    return one.prompt[0]["content"], "".join(each.action.text[-1] for each in one.turns)


def test_a_turn_is_seen_in_the_context_in_which_it_was_taken():
    """Turn f is a retry of turn e, so both follow b. Turn c opens the conversation of a helper, g the own one."""
    assert [seen(index) for index in range(7)] == [
        ("do", "a"),
        ("do", "ab"),
        ("help", "c"),
        ("help", "cd"),
        ("do", "abe"),
        ("do", "abf"),
        ("do", "g"),
    ]
    assert TREE.seen_from(3).tools == HELPER.tools
    assert TREE.seen_from(3).template_kwargs == HELPER.template_kwargs
    assert all(TREE.seen_from(index).is_linear for index in range(7))


def test_an_episode_of_several_sequences_is_neither_linear_nor_one_sequence():
    """Its first two turns are."""
    begun = replace(TREE, turns=TREE.turns[:2])

    assert (TREE.is_linear, TREE.is_one_sequence) == (False, False)
    assert (begun.is_linear, begun.is_one_sequence) == (True, True)


def test_a_tree_comes_back_from_a_file_and_a_linear_episode_is_written_as_before():
    """The fields are sparse: only the turns that have a place of their own write it."""
    written = json.loads(line_of(TREE))

    assert parse_line(Trajectory, line_of(TREE), "line 1") == TREE
    assert [sorted({"follows", "opening"} & set(each)) for each in written["turns"]] == [
        [], [], ["follows", "opening"], [], ["follows"], ["follows"], ["follows"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("index", "place", "said"),
    [
        (1, {"follows": 1}, "turns[1].follows: expected -1 or the index of an earlier turn, got 1"),
        (1, {"follows": -2}, "turns[1].follows"),
        (0, {"opening": HELPER, "follows": OPENS}, "turns[0].opening: expected it at a later turn"),
        (1, {"opening": HELPER}, "turns[1].opening: expected it at a later turn with follows=-1"),
    ],
)
def test_a_turn_that_cannot_stand_where_it_says_is_refused(index, place, said):
    """In Python and in a file."""
    whole = replace(TREE, turns=TREE.turns[:2])
    turns = [dict(each) for each in trajectory_to_dict(whole)["turns"]]
    record = trajectory_to_dict(whole) | {"turns": turns}
    turns[index] |= {
        key: trajectory_to_dict(TREE)["turns"][2][key] if key == "opening" else value
        for key, value in place.items()
    }

    with pytest.raises(DataError) as in_python:
        replace(
            whole,
            turns=tuple(
                replace(each, **place) if at == index else each for at, each in enumerate(whole.turns)
            ),
        )
    with pytest.raises(DataError) as in_file:
        trajectory_from_dict(record)

    assert said in str(in_python.value)
    assert said.partition(":")[0] in str(in_file.value)


def test_a_shortened_history_has_no_other_sequences():
    """Each of its turns is a sequence already."""
    with pytest.raises(DataError, match="history: expected null where a turn has follows, got 2"):
        replace(TREE, history=2)
