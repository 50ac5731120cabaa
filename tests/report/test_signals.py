"""Triage signals on episodes made for them: each shows where it should, and not a turn before."""

from dataclasses import replace

import pytest

from perturn.episodes.triage_signals import SIGNALS, meaning, signals_of
from perturn.types import Action, Status, Task, Trajectory, Turn


def episode(actions, seen=None, rewards=None, states=None, **changes):
    """An episode of these actions; without `seen`, each observation is a new one."""
    count = len(actions)
    seen = seen or [f"view {index}" for index in range(count)]
    turns = tuple(
        Turn(({"role": "user", "content": seen[i]},), Action(f"Thought: {i}\nAction: {actions[i]}"),
             reward=(rewards or [0.0] * count)[i], state_key=(states or [None] * count)[i])
        for i in range(count)
    )  # fmt: skip
    return replace(Trajectory(Task("t"), turns, terminated=True), **changes)


@pytest.mark.parametrize(
    ("trajectory", "expected"),
    [
        (episode("abcdef"), []),
        (episode("ab", status=Status.FAILED), ["broken"]),
        (episode("ab", truncated=True), ["exhaustion"]),
        (episode("xaab"), []),
        (episode("xaaab"), ["loop"]),
        (episode("xabab"), []),
        (episode("xababab"), ["loop"]),
        (episode("abcabcabc"), ["loop"]),
        (episode("abcabcabx"), []),
        (episode("abcdabcdabcd"), []),
        (episode("axaya", states=["s", "r", "s", "q", "s"]), ["loop"]),
        (episode("axaya", states=["s", "r", "s", "q", "p"]), []),
        (episode("abcdef", seen=["n", *"vvvvv"]), []),
        (episode("abcdefg", seen=["n", *"vvvvvv"]), ["stagnation"]),
        (episode("abcdefg", seen=["n", *"vvvvvv"], rewards=[0, 0, 0, 1, 0, 0, 0]), []),
        (episode(""), []),
    ],
)
def test_an_episode_shows_its_signals(trajectory, expected):
    assert signals_of(trajectory) == expected


def test_invalid_and_cut_actions_are_signals():
    turn = episode("a").turns[0]

    assert signals_of(episode("", turns=(replace(turn, valid=False),))) == ["failure"]
    assert signals_of(episode("", turns=(replace(turn, action=Action("a", ended=False)),))) == ["cut"]


def test_every_signal_says_what_it_means():
    assert all(meaning(name).endswith(".") for name in SIGNALS)
    assert not any(meaning(name).startswith("Return") for name in SIGNALS)


def test_a_repeated_call_is_a_loop_whatever_its_ids():
    calls = [{"id": f"call_{n}", "function": {"name": "look", "arguments": {}}} for n in range(3)]
    turns = tuple(Turn((), Action("", tool_calls=(call,))) for call in calls)

    assert "loop" in signals_of(Trajectory(Task("t"), turns))
