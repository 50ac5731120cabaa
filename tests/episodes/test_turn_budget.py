"""Turn limits that an agent is told of, and extensions: given, refused and used up."""

from dataclasses import dataclass, field, replace

import pytest

from perturn.episodes.episode import Job, episode
from perturn.episodes.formats import FORMATS
from perturn.episodes.triage_signals import stagnation
from perturn.rules import TurnControl
from perturn.types import Action, EpisodeProtocol, Observation, Task

PROTOCOL = EpisodeProtocol("plain", format="action", max_turns=4, max_turns_by_kind={"long": 9})
SILENT = {"reminder": False, "extend": 3, "progress": 1}


@dataclass
class Corridor:
    """'go' shows a room that is new, 'look' the first one again, 'pay' the same for a reward; 'out' ends it."""

    room: int = 0
    name = "corridor-1"
    paid: dict = field(default_factory=lambda: {"pay": 0.5, "fine": -0.5})

    def reset(self, task, seed):
        """Stand in the first room."""
        self.room = 0
        return Observation("room 0")

    def step(self, action):
        """Walk, stand, or leave."""
        if action not in ("go", "look", "out", *self.paid):
            return Observation(f"what is {action}?", valid=False)
        self.room += action == "go"
        text = f"room {self.room}" if action == "go" else "room 0"
        left = action == "out"
        return Observation(text, self.paid.get(action, 0.0), terminated=left, success=left)

    def close(self):
        """Hold nothing."""


def play(actions, kind="", protocol=PROTOCOL, **control):
    """The prompts of an episode and its trajectory; the last action is repeated for ever."""
    rules = replace(protocol, turns=TurnControl(**control)) if control else protocol
    steps = episode(Corridor(), Job(Task("a", kind=kind), 0), protocol=rules)
    prompts, texts = [next(steps)], [f"Action: {one}" for one in actions]
    try:
        while True:
            prompts.append(steps.send(Action(texts[min(len(prompts), len(texts)) - 1])))
    except StopIteration as end:
        return prompts, end.value


def told(prompt):
    return prompt.observation[-1]["content"]


@pytest.mark.parametrize(("kind", "limit", "turns"), [("", None, 4), ("long", None, 9), ("long", 3, 3)])
def test_a_limit_takes_the_place_of_the_protocols(kind, limit, turns):
    """That of a kind of task too; without one the protocol's own holds."""
    _, played = play(["go"], kind, limit=limit)

    assert len(played.turns) == turns
    assert played.truncated


def test_each_observation_ends_with_the_turns_that_are_left():
    """The newest turn counts as left; what is recorded is what was seen."""
    prompts, played = play(["go"], limit=3)

    assert [told(each) for each in prompts] == [
        "room 0\nYou have 3 turns left.",
        "room 1\nYou have 2 turns left.",
        "room 2\nYou have 1 turn left.",
    ]
    assert [turn.observation_text for turn in played.turns] == [told(each) for each in prompts]


def test_without_a_reminder_nothing_is_told():
    prompts, _ = play(["go"], limit=1, **SILENT)

    assert [told(each) for each in prompts] == ["room 0", "room 1", "room 2", "room 3"]


def test_an_extension_is_told():
    """Also where reminders before it spoke of the first limit alone."""
    prompts, played = play(["go"], limit=1, extend=2)

    assert [told(each) for each in prompts] == [
        "room 0\nYou have 1 turn left.",
        "room 1\nYou are given 2 turns more. You have 2 turns left.",
        "room 2\nYou have 1 turn left.",
    ]
    assert played.truncated


@pytest.mark.parametrize(
    ("actions", "progress", "turns"),
    [
        (["look", "go", "look"], 1, 5),
        (["go", "look", "look"], 1, 2),
        (["go", "look", "look"], 2, 5),
        (["look", "pay", "look"], 1, 5),
        (["look", "fine", "look"], 1, 2),
        (["look", "dance", "look"], 1, 2),
        (["look", "look", "look"], None, 5),
    ],
    ids=["new", "known", "new before", "reward", "penalty", "not understood", "all"],
)
def test_an_extension_is_for_those_who_make_progress(actions, progress, turns):
    """Two turns, and three more after something new or a reward in the last turns; without a measure, for all."""
    _, played = play(actions, limit=2, extend=3, progress=progress)

    assert len(played.turns) == turns
    assert (played.terminated, played.truncated) == (False, True)


def test_what_breaks_the_format_is_no_progress():
    """Its reminder is new when it is first seen."""
    rules = replace(PROTOCOL, turns=TurnControl(limit=1, **SILENT))
    steps = episode(Corridor(), Job(Task("a"), 0), protocol=rules)
    next(steps)

    with pytest.raises(StopIteration) as end:
        steps.send(Action("go"))

    assert len(end.value.value.turns) == 1
    assert FORMATS["action"].parse("go") is None


@pytest.mark.parametrize(("times", "turns"), [(1, 5), (2, 8), (3, 11)])
def test_extensions_are_used_up(times, turns):
    """2 + 3 for each, however much is new."""
    _, played = play(["go"], limit=2, times=times, **SILENT)

    assert len(played.turns) == turns


def test_a_second_extension_is_asked_for_by_the_turns_of_the_first():
    """Progress before the first does not count again."""
    _, played = play(["go", "go", "look"], limit=2, times=2, **SILENT)

    assert len(played.turns) == 5


def test_an_episode_that_ends_needs_none():
    """At its very last turn, and in an extension."""
    for actions, turns in ((["go", "out"], 2), (["go", "go", "go", "out"], 4)):
        _, played = play(actions, limit=2, **SILENT)

        assert len(played.turns) == turns
        assert (played.success, played.terminated, played.truncated) == (True, True, False)


def test_a_shortened_history_has_the_newest_reminder_alone():
    """As with lists of commands: what was left some turns ago is no news."""
    prompts, played = play(["go"], protocol=replace(PROTOCOL, history=2), limit=4)

    last = prompts[-1]
    assert told(last) == "room 3\nYou have 1 turn left."
    assert "You have" not in "".join(turn.observation_text for turn in last.turns)
    assert played.turns[1].recalled[0]["content"] == "room 1"


class Tools:
    """A world that is called, and answers with results."""

    name = "tools-1"
    tools = ({"type": "function", "function": {"name": "count", "parameters": {}}},)

    def reset(self, task, seed):
        """Ask."""
        self.count = 0
        return Observation("Count.", tools=self.tools)

    def step(self, action):
        """Count up to two."""
        self.count = min(2, self.count + 1)
        return Observation("", results=(f"{self.count}",))

    def close(self):
        """Hold nothing."""


def test_where_tools_answer_the_reminder_ends_the_last_result():
    """No message of a user comes between; a result that was not there before is progress: 1, then 2, then no more."""
    rules = EpisodeProtocol("p", format="tools", turns=TurnControl(limit=1, extend=1, times=9, progress=1))
    steps = episode(Tools(), Job(Task("a"), 0), protocol=rules)
    call = Action("", tool_calls=({"type": "function", "function": {"name": "count", "arguments": {}}},))
    prompts = [next(steps)]
    prompts += [steps.send(call), steps.send(call)]
    with pytest.raises(StopIteration) as end:
        steps.send(call)

    assert [[message["role"] for message in each.observation] for each in prompts] == [
        ["user"],
        ["tool"],
        ["tool"],
    ]
    assert told(prompts[1]) == "1\nYou are given 1 turn more. You have 1 turn left."
    assert len(end.value.value.turns) == 3


def test_reminders_hide_no_stagnation():
    """Each observation is another one with them; six times the same room is stagnation still."""
    _, plain = play(["look"], protocol=replace(PROTOCOL, max_turns=7))
    _, reminded = play(["look"], limit=7)
    _, extended = play(["look"], limit=1, extend=6, progress=None)

    assert stagnation(plain)
    assert stagnation(reminded)
    assert stagnation(extended)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"limit": 0}, "limit must be >= 1, got 0"),
        ({"extend": 0}, "extend must be >= 1, got 0"),
        ({"times": 2}, "extend must be set where times or progress is"),
        ({"progress": None}, "extend must be set where times or progress is"),
        ({"reminder": False}, "limit must be set where there is no reminder and no extension"),
        (
            {"reminder": False, "extend": 2, "progress": None},
            "progress must be set if reminder is false",
        ),
    ],
)
def test_control_that_controls_nothing_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        TurnControl(**settings)
