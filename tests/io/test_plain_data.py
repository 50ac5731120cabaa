"""What a world or a policy writes is data: whatever it is, the turn or the episode is lost, and nothing else."""

import json
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturn.chat.tokens import Renderer
from perturn.config.sections import ProtocolSettings, Tasks
from perturn.data.records import trajectory_to_dict
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.engines.api.completion import to_chat
from perturn.episodes.episode import Job, episode
from perturn.episodes.tool_calls import understand
from perturn.errors import ConfigError, DataError, EnvironmentFailure, ModelError
from perturn.faults import task_fault
from perturn.formats.chat_messages import read_answer
from perturn.formats.trl_rows import from_trl
from perturn.io.plain_data import error_text, fault, mended, named_error
from perturn.run.protocol_rules import make_protocol
from perturn.run.stages.collect_stage import demonstrate
from perturn.run.task_lists import choose_tasks
from perturn.types import Action, EpisodeProtocol, Observation, Status, Task, Trajectory, Turn

HALF = "fine \ud800"
PLAY = EpisodeProtocol("p", "action", max_turns=2)
TASK = Task("t")
TOOLS = EpisodeProtocol("p", "tools", max_turns=2)
SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {}}}


def deep(levels):
    """Lists within lists."""
    inner = []
    for _ in range(levels):
        inner = [inner]
    return inner


class World:
    """Answers what it is told to."""

    name = "world-1.0"

    def __init__(self, *answers, tools=(), tasks=()):
        self.answers, self.tools, self.listed = list(answers), tools, tasks

    def tasks(self, split):
        """What it was given."""
        return self.listed

    def reset(self, task, seed):
        """Pose the task."""
        return Observation("go on", tools=self.tools)

    def step(self, action):
        """The next answer."""
        self.heard = action
        answer = (
            self.answers.pop(0)
            if self.answers
            else Observation("go on", results=("seen",) * bool(self.tools))
        )
        if isinstance(answer, BaseException):
            raise answer
        return answer


def played(world, *actions, protocol=PLAY, task=TASK):
    """The trajectory of actions, each a text or an Action."""
    steps = episode(world, Job(task, 0), protocol=protocol)
    try:
        next(steps)
        for action in actions:
            steps.send(action if isinstance(action, Action) else Action(action))
    except StopIteration as end:
        return end.value
    raise AssertionError("the episode goes on")


def stored(trajectory, folder):
    """The trajectory as it is read back."""
    with TrajectoryStore(folder / "trajectories.jsonl") as store:
        store.append(trajectory)
    (back,) = read_trajectories(folder / "trajectories.jsonl")
    return back


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (HALF, "x: expected valid Unicode, got 'fine \\ud800' (str)"),
        ({"a": [1, {"b": HALF}]}, "x.a[1].b: expected valid Unicode"),
        ({HALF: 1}, "x: expected keys of valid Unicode"),
        ({"a": float("nan")}, "x.a: expected a finite number, got nan (float)"),
        ([float("-inf")], "x[0]: expected a finite number"),
        ([10**5000], "x[0]: expected a whole number below 2**1024, got a larger one (int)"),
        ({1: 2}, "x.1: expected a text key, got 1 (int)"),
        ({"a": b"x"}, "x.a: expected JSON data, got b'x' (bytes)"),
        ({"a": np.float32(1)}, "x.a: expected JSON data, got "),
        (MappingProxyType({}), "x: expected JSON data, got mappingproxy({})"),
        (deep(900), "x" + "[0]" * 100 + ": expected at most 100 levels"),
        (deep(100_000), "x" + "[0]" * 100 + ": expected at most 100 levels"),
    ],
)
def test_what_is_not_plain_is_named_with_its_place(value, says):
    """Path, expectation, and what is there; the sentence itself is plain."""
    found = fault(value, "x")

    assert found.startswith(says)
    assert fault(found, "found") is None


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**1000), 2**1000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50)
@given(PLAIN)
def test_plain_data_survives_json_in_utf_8(value):
    assert fault(value, "x") is None
    assert json.loads(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.text(st.characters()))
def test_a_mended_text_is_valid_and_a_valid_one_is_left_alone(text):
    """One U+FFFD for each half that is alone."""
    assert fault(mended(text), "x") is None
    assert mended(text) == text or fault(text, "x")
    assert mended("a\ud800b\udc00") == "a\ufffdb\ufffd"
    assert mended("\ud83d\ude00") == "\U0001f600"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Observation(HALF), "text: expected valid Unicode"),
        (Observation("x", state_key=HALF), "state_key: expected valid Unicode"),
        (Observation("x", admissible=("a", HALF)), "admissible[1]: expected valid Unicode"),
        (Observation("x", results=(HALF,)), "results[0]: expected valid Unicode"),
        (Observation("x", admissible=[1]), "admissible=(1,)"),
        (Observation("x", success=None), "success=None"),
        (Observation("x", success=np.array([True])), "success=array([ True])"),
        (Observation(b"x"), "a text of type bytes"),
        (Observation("x", reward=10**400), "the reward inf, which is not finite"),
        (Observation("x", reward=-1e308), "the reward -1e+308, beyond 1e+100"),
        (
            Observation("x", tools=({"function": {"x": float("inf")}},)),
            "tools[0].function.x: expected a finite",
        ),
        (
            Observation("x", tools=({"function": MappingProxyType({})},)),
            "tools[0].function: expected JSON data",
        ),
        (Observation("x", tools=({"a": deep(900)},)), ": expected at most 100 levels"),
    ],
)
def test_an_observation_that_cannot_be_carried_fails_its_episode(tmp_path, answer, says):
    """The remedy is told, the trajectory is stored, and nothing raises."""
    found = played(World(answer), "Action: a")

    assert found.status is Status.FAILED
    assert says in found.error
    assert "Remedy: " in found.error
    assert stored(found, tmp_path) == found


def test_numbers_of_other_libraries_become_our_own(tmp_path):
    """A float32 in this process is stored as in a process of its own; two rewards of 1e100 have a finite sum."""
    found = played(
        World(*[Observation("x", reward=np.float32(0.5)), Observation("x", reward=10**100)]),
        *["Action: a"] * 2,
    )

    assert [type(turn.reward) for turn in found.turns] == [float, float]
    assert stored(found, tmp_path) == found


@pytest.mark.parametrize("said", ["plain", HALF, "x" * 10**7])
def test_an_exception_of_a_world_is_stored_whatever_it_says(tmp_path, said):
    """Half a pair is mended, and ten megabytes are cut."""
    found = played(World(ValueError(said)), "Action: a")

    assert found.error.startswith(f"ValueError: {mended(said)[:100]}")
    assert len(found.error) < 3000
    assert stored(found, tmp_path) == found


def test_an_exception_that_cannot_say_what_it_is_is_told_by_its_type():
    """And a world that calls sys.exit in this process ends its own episode."""

    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    assert played(World(SystemExit(3)), "Action: a").error == "SystemExit: 3"
    assert played(World(Silent()), "Action: a").error == "Silent: (no text: RuntimeError)"
    assert (error_text(ValueError("x")), named_error(ValueError("x"))) == ("x", "ValueError: x")


def test_an_action_with_half_a_character_is_an_invalid_turn(tmp_path):
    """The world hears nothing of it, the text has U+FFFD, and token ids stay as sampled."""
    world = World()
    found = played(world, Action(f"Action: {HALF}", token_ids=(5, 7), logprobs=(-1.0, -2.0)), "Action: a")

    assert (found.status, world.heard) == (Status.COMPLETED, "a")
    assert [turn.valid for turn in found.turns] == [False, True]
    assert found.turns[0].action == Action("Action: fine \ufffd", (5, 7), (-1.0, -2.0))
    assert stored(found, tmp_path) == found


def call(arguments, name="look"):
    """Text of a call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": NaN}',
        '{"x": -Infinity}',
        '{"x": 1e999}',
        '{"x": "\\ud800"}',
        '{"\\ud800": 1}',
        '{"x": ' + "1" * 5000 + "}",
        '{"x": ' + "1" * 400 + "}",
        '{"x": ' + "[" * 900 + "]" * 900 + "}",
        '{"x": ' + '{"a": ' * 900 + "1" + "}" * 901,
    ],
)
@pytest.mark.parametrize("native", [False, True])
def test_arguments_that_cannot_be_carried_are_an_invalid_turn(tmp_path, tokenizer, arguments, native):
    """In a text, and as the calls of an engine; the next prompt can be rendered, for a model and for a server."""
    world = World(tools=(SCHEMA,))
    action = Action(call(arguments))
    if native:
        try:
            read = json.loads(arguments)
        except ValueError:  # an engine keeps what is no JSON as text
            read = arguments
        action = Action("", tool_calls=({"function": {"name": "look", "arguments": read}},))
    steps = episode(world, Job(Task("t"), 0), protocol=TOOLS)
    next(steps)
    prompt = steps.send(action)
    renderer = Renderer(tokenizer, "tools")

    assert renderer.prompt_ids(prompt)
    json.dumps(to_chat(prompt), ensure_ascii=False).encode()
    with pytest.raises(StopIteration) as end:
        steps.send(Action(call("{}")))
    found = end.value.value
    assert [turn.valid for turn in found.turns] == [False, True]
    assert stored(found, tmp_path) == found
    assert renderer.encode(found).turns == 2


def test_a_server_may_nest_arguments_as_deep_as_it_likes():
    """They stay text, as all that is no JSON object; so the call is an invalid turn."""
    bomb = '{"a": ' * 100_000
    call = {"function": {"name": "look", "arguments": bomb}}
    (call,) = read_answer({"tool_calls": [call]}, "answer").tool_calls

    assert call["function"]["arguments"] == bomb
    assert understand(Action("", tool_calls=(call,)))[1] is None


def test_calls_outside_of_the_format_are_data_too(tmp_path):
    """A server that was offered no tools may still answer with a call."""
    odd = Action("Action: a", tool_calls=({"function": {"name": "look", "arguments": {"x": float("nan")}}},))
    found = played(World(), odd, "Action: a")

    assert [turn.valid for turn in found.turns] == [False, True]
    assert found.turns[0].action.text.startswith('Action: a\n[{"function": ')
    assert stored(found, tmp_path) == found


@pytest.mark.parametrize("name", ['a\\"b', "a\\nb", "a\\\\b", "\\u0000", "<|im_end|>", "\\u2603", " look "])
def test_a_strange_name_of_a_tool_ends_nothing(tmp_path, tokenizer, name):
    """The world says that there is no such tool; the template writes the name with escapes."""
    renderer = Renderer(tokenizer, "tools")
    found = played(World(tools=(SCHEMA,)), call("{}", name), call("{}"), protocol=TOOLS)

    assert found.turns[0].action.tool_calls[0]["function"]["name"] == json.loads(f'"{name}"')
    assert renderer.encode(found).turns == 2
    assert stored(found, tmp_path) == found


@pytest.mark.parametrize("name", ["look", 'a"b'])
def test_a_template_that_leaves_out_calls_is_still_refused(renderer, name):
    """SmolLM2's own writes none, whatever the name."""
    wrote = Action("So.", tool_calls=({"type": "function", "function": {"name": name, "arguments": {}}},))
    turn = Turn(({"role": "user", "content": "x"},), wrote)

    with pytest.raises(ModelError, match=r"leaves out tool calls: turn 0 calls .* such as .*tools"):
        renderer.encode(Trajectory(Task("t"), (turn,)))


def test_log_probabilities_that_are_no_numbers_fail_the_episode(tmp_path):
    """A policy whose weights diverged."""
    found = played(World(), Action("Action: a", (5,), (float("nan"),)))

    assert (found.status, found.turns) == (Status.FAILED, ())
    assert "log-probabilities that are not finite" in found.error
    assert stored(found, tmp_path) == found


def test_an_expert_that_writes_nonsense_fails_its_episode():
    """Not two texts per turn; in the tools format, what is no text."""
    world = World(tools=(SCHEMA,))
    world.demonstration = lambda task: [("thought",)]
    assert demonstrate(world, Job(Task("t"), 0), PLAY).status is Status.FAILED
    world.demonstration = lambda task: [("thought", 7)]
    assert demonstrate(world, Job(Task("t"), 0), TOOLS).status is Status.FAILED


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Task(HALF), "a task has id='fine \\ud800'"),
        (Task(7), "a task has id=7"),
        (Task("t", kind=None), "a task has kind=None"),
        (Task("t", data=[1]), "the data of task 't' is [1]"),
        (Task("t", data={"a": {1, 2}}), "task 't' has data.a: expected JSON data, got {1, 2}"),
        (Task("t", data={"a": float("nan")}), "task 't' has data.a: expected a finite number"),
    ],
)
def test_a_task_that_cannot_be_stored_is_refused_before_it_is_played(task, says):
    """With the environment's name."""
    assert task_fault(task).startswith(says)
    with pytest.raises(EnvironmentFailure, match=r"world-1\.0: .*Remedy: "):
        choose_tasks(World(tasks=[task]), Tasks())


def test_a_row_with_half_a_character_costs_its_own_episode(tmp_path):
    """It is stored with its data as it was; what the policy would be shown of it fails the episode."""
    task = Task("t", data={"text": HALF})
    found = played(World(Observation(task.data["text"])), "Action: a", task=task)

    assert task_fault(task) is None
    assert found.status is Status.FAILED
    assert stored(found, tmp_path) == found


def test_a_protocol_with_half_a_character_is_a_wrong_setting():
    """Before anything is played."""
    with pytest.raises(ConfigError, match=r"protocol\.system: expected valid Unicode"):
        make_protocol(ProtocolSettings("mine", system=HALF, max_turns=3))
    with pytest.raises(ValueError, match=r"example\[0\]\.content: expected valid Unicode"):
        EpisodeProtocol(
            "p", example=({"role": "user", "content": HALF}, {"role": "assistant", "content": "x"})
        )


def test_the_store_takes_no_text_that_a_tokenizer_refuses():
    """Of those who write one themselves; and no data that no reader reads."""
    turn = Turn(({"role": "user", "content": HALF},), Action("x"))
    with pytest.raises(DataError, match=r"turns\[0\]\.observation\[0\]\.content: expected valid Unicode"):
        trajectory_to_dict(Trajectory(Task("t"), (turn,)))
    with pytest.raises(DataError, match=r"turns\[0\]\.action\.text: expected valid Unicode"):
        trajectory_to_dict(Trajectory(Task("t"), (Turn((), Action(HALF)),)))
    with pytest.raises(DataError, match="expected at most 100 levels"):
        trajectory_to_dict(Trajectory(Task("t", data={"a": deep(10_000)}), ()))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (HALF, "row 3: messages[0].content: expected valid Unicode"),
        (deep(5000), "row 3: messages: too many levels"),
    ],
)
def test_a_row_for_training_is_refused_by_its_number(content, says):
    """Before training begins, rather than in its midst."""
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}

    with pytest.raises(DataError) as caught:
        from_trl(row, task_id="t", index=3)

    assert str(caught.value).startswith(says)


def test_a_thought_with_half_a_character_is_mended(tmp_path):
    """It is no part of what the world is sent, so the turn is valid."""
    found = played(World(), Action("Action: a", reasoning="dark\ud83d"), "Action: a")

    assert found.turns[0].action == Action("Action: a", reasoning="dark\ufffd")
    assert found.turns[0].valid
    assert stored(found, tmp_path) == found
