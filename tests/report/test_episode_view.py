"""What the page holds of a turn: thought and action apart, numbers at the turn they belong to, tokens."""

from dataclasses import replace

import pytest

from perturn.report.episode_view import (
    LONGEST,
    action_text,
    body,
    by_turn,
    clip,
    message_text,
    own_confidence,
    split_action,
    tokens,
)
from perturn.types import OPENS, Action, Opening, Task, Trajectory, Turn


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thought: I look.\nAction: look", ("I look.", "look")),
        ("Thought: two\nlines\nAction: go\nnorth", ("two\nlines", "go\nnorth")),
        ("Action: look", ("", "look")),
        ("look", ("", "look")),
        ("<think>hm</think>\nAction: look", ("hm", "look")),
        ("<think>hm</think>Thought: so\nAction: look", ("hm\nso", "look")),
        ("Thought: never acts", ("", "Thought: never acts")),
        ("", ("", "")),
    ],
)
def test_thought_and_action_are_told_apart(text, expected):
    assert split_action(text) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"weight": [0.2, 1.0]}, (0.2, 1.0, None)),
        ({"weight": [0.2, 1.0], "turn": [1, 2]}, (None, 0.2, 1.0)),
        ({"weight": [0.2, float("nan"), True]}, (0.2, None, None)),
        ({}, ()),
    ],
)
def test_values_stand_at_the_turn_they_belong_to(row, expected):
    """Turns whose loss is masked, or that were dropped, have none."""
    assert by_turn(row, "weight", 3) == expected


def _trajectory(*actions):
    return Trajectory(
        Task("t"), tuple(Turn(({"role": "user", "content": "o"},), action) for action in actions)
    )


def test_tokens_of_the_reference_come_before_those_of_the_policy():
    """-0.5 nats are 500 thousandths below 0; a turn without tokens has None."""
    one = _trajectory(Action("a", (3, 4), (-0.25, 0.0)), Action("b"))
    noted = {"ids": [7, 8], "turn": [1, 1], "logprobs": [-0.5, -0.0004]}

    assert tokens(one, {}) == {"by": "policy", "turns": [[[3, 4], [250, 0]], None]}
    assert tokens(one, noted) == {"by": "reference", "turns": [None, [[7, 8], [500, 0]]]}
    assert tokens(_trajectory(Action("b")), {}) is None


def test_confidence_is_the_policys_own_where_the_reference_is_silent():
    """exp((-0.25 + 0)/2) = 0.8825."""
    one = _trajectory(Action("a", (3, 4), (-0.25, 0.0)), Action("b"))

    assert body(one, 0, {})["confidence"] == [0.8825, None]
    assert body(one, 0, {})["by"] == "policy"
    known = body(one, 0, {"confidence": [0.5, 1.0000001]})
    assert (known["confidence"], known["by"]) == ([0.5, 1.0], "reference")


def test_native_calls_parts_and_roles_are_kept():
    call = {"name": "search", "arguments": {"query": "tin"}}
    parts = [{"type": "text", "text": "found"}, {"type": "image", "id": 3}]
    turn = Turn(({"role": "tool", "content": parts},), Action("", tool_calls=(call,)), valid=False)

    shown = body(Trajectory(Task("t"), (turn,)), 0, {})["turns"][0]

    assert shown == {
        "o": '[tool] found\n{"type": "image", "id": 3}',
        "call": ['{"name": "search", "arguments": {"query": "tin"}}'],
        "bad": 1,
    }


def test_long_texts_are_cut_and_counted():
    assert clip("x" * LONGEST) == "x" * LONGEST
    assert clip("x" * (LONGEST + 1500)).endswith("x … (1,500 more characters)")


def test_the_page_holds_the_place_of_each_turn_in_the_tree_of_sequences():
    """A retry of the second turn, and a helper's conversation with a prompt of its own; a linear episode has none."""
    one = _trajectory(*map(Action, "abcd"))
    helper = Opening(({"role": "system", "content": "help"},))
    placed = (replace(one.turns[2], follows=0), replace(one.turns[3], follows=OPENS, opening=helper))

    found = body(replace(one, turns=(*one.turns[:2], *placed)), 0, {}, {3: 7})

    assert (found["follows"], found["openings"]) == ([-1, 0, 0, -1], {"3": 7})
    assert "follows" not in body(one, 0, {})


def test_reasoning_and_calls_without_a_text_are_shown():
    call = {"name": "look", "arguments": {}}
    action = Action("", tool_calls=(call,), reasoning="I look.")
    written = '{"name": "look", "arguments": {}}'

    assert body(_trajectory(action), 0, {})["turns"][0] == {"o": "o", "h": "I look.", "call": [written]}
    assert message_text(action.message()) == f"I look.\n{written}"
    assert action_text(action) == written
    both = Action("<think>So.</think>go", reasoning="I look.")
    assert body(_trajectory(both), 0, {})["turns"][0]["h"] == "I look.\nSo."


@pytest.mark.parametrize(
    ("text", "calls", "expected"),
    [
        ("Thought: " + "long " * 50 + "\nAction: open cabinet 3", (), "open cabinet 3"),
        ("<think>So.</think>I look.", ({"name": "look"},), '{"name": "look"}\nI look.'),
        ("<think>Never ends", (), "<think>Never ends"),
        ("<think>Only a thought</think>", (), "<think>Only a thought</think>"),
    ],
)
def test_an_action_in_a_column_is_without_its_thought(text, calls, expected):
    """Columns and hovers show only the start of an action."""
    assert action_text(Action(text, tool_calls=calls)) == expected


def test_a_confidence_is_at_most_one():
    """A file of others may hold a log-probability above 0, whose exponential is too large for a float."""
    assert own_confidence(Turn((), Action("a", (1,), (1000.0,)))) == 1.0
