"""A plain game of the user's is an environment: what its methods may take and return."""

import io
import json

import pytest

from perturn.cli import main
from perturn.envs.environment_check import check_environment
from perturn.envs.load_environment import make_environment
from perturn.envs.user_environment import OwnWorld, at_border
from perturn.episodes.formats import FORMATS
from perturn.episodes.tool_calls import ToolAction, ToolCall, read_action, write_action
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.io.user_code import load_object
from perturn.run.protocol_rules import evaluation_split, first_split
from perturn.types import Observation, Task
from support.guess import Guess, game


def test_three_methods_are_an_environment():
    """Values are tasks, which reset gets back; a text goes on, and a tuple with a reward ends in success."""
    world = at_border(Guess(), "Guess")
    first, _ = world.tasks("train")

    assert world.name == "Guess"
    assert (first.id, first.split) == ("7", "train")
    assert world.reset(first, 0) == Observation("Guess.")
    assert world.step("8") == Observation("Wrong.")
    assert world.step("7") == Observation("Right!", 1.0, terminated=True, success=True)
    world.close()
    assert check_environment(Guess) == []


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (("on", 0.5, False), Observation("on", 0.5)),
        (("over", 0.0, True), Observation("over", terminated=True)),
        (("won", 1.0, True, {}), Observation("won", 1.0, True, True)),
        (("lost", 1.0, True, {"success": False}), Observation("lost", 1.0, True)),
        (("what?", 0.0, False, {"valid": False}), Observation("what?", valid=False)),
        (("go", 0.0, False, {"state_key": "hall"}), Observation("go", state_key="hall")),
        (("cut", 1.0, False, True, {}), Observation("cut", 1.0, True)),
        (("won", 1.0, True, False, {}), Observation("won", 1.0, True, True)),
        (("go", 0.0, False, {"admissible_commands": ["up"]}), Observation("go", admissible=("up",))),
        (Observation("as it is", 0.1), Observation("as it is", 0.1)),
    ],
)
def test_tuples_are_those_of_gym_and_gymnasium(said, seen):
    assert game(step=lambda self, action: said).step("x") == seen


@pytest.mark.parametrize("said", [None, 7, ("text", 1.0), ("a", 1.0, True, "info"), {"text": "a"}, ()])
def test_other_answers_are_named_with_a_remedy(said):
    """Nothing is guessed: two values may be a reward or an end."""
    problems = check_environment(type("Game", (Guess,), {"step": lambda self, action: said}))

    assert any("not an Observation. Remedy: return a text, (text, reward, done)" in each for each in problems)


def test_a_swapped_tuple_is_told():
    """(text, done, reward) has a bool where the reward stands."""
    problems = check_environment(type("Game", (Guess,), {"step": lambda self, action: ("a", True, 1.0)}))

    assert any("the reward True, which is not a number" in each for each in problems)


@pytest.mark.parametrize(
    "reset",
    [
        lambda self, task: f"{task}",
        lambda self, task, seed: f"{task}",
        lambda self, task, *, seed: f"{task}",
        lambda self, task, seed=0: f"{task}",
        lambda self, *arguments: f"{arguments[0]}",
        lambda self, task, loud=False: f"{task}" if loud is False else "loud",
        lambda self, task: (f"{task}", {}),
    ],
)
def test_reset_is_called_as_it_is_written(reset):
    """With the seed only where it takes one."""
    world = game(reset=reset)

    assert world.reset(world.tasks("train")[0], 3).text == "7"


def test_tasks_without_a_split_are_of_train():
    """So that no task is taught and scored."""
    world = game(tasks=lambda self: ["a", "b"])

    assert [task.id for task in world.tasks("train")] == ["a", "b"]
    with pytest.raises(Exception, match="has no split, so all its tasks are in 'train'"):
        world.tasks("test")


def test_listed_values_come_back_as_they_were():
    """Also from another process, which has listed nothing; an id, a kind and a gold answer of a dict are the task's."""
    listed = [{"id": "one", "kind": "sum", "answer": "3", "terms": (1, 2)}, "a", 5, [1, 2], "two\nlines"]
    world = game(tasks=lambda self, split: listed, reset=lambda self, task: repr(task))
    tasks = world.tasks("train")

    assert [task.id for task in tasks] == ["one", "a", "5", "train/3", "train/4"]
    assert (tasks[0].kind, tasks[0].data["answer"]) == ("sum", "3")
    sent = [Task(**json.loads(json.dumps(vars(task)))) for task in tasks]
    assert [world.reset(task, 0).text for task in sent] == [
        repr(each) for each in [{**listed[0], "terms": [1, 2]}, *listed[1:]]
    ]


def test_tasks_of_ones_own_stay_as_they_are():
    """And reset gets the task."""
    own = Task("mine", data={"secret": 3})
    world = game(tasks=lambda self, split: [own], reset=lambda self, task: task.id)

    assert world.tasks("train") == [own]
    assert world.reset(own, 0).text == "mine"


def test_a_plain_game_may_be_asynchronous():
    async def step(self, action):
        return "Right!", 1.0, True

    world = game(step=step)
    world.reset(world.tasks("train")[0], 0)

    assert world.step("7").success
    world.close()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["tasks", "step"], r"Method tasks\(\) is missing in Game.*Method step\(\) is missing in Game"),
        (["tasks"], r"no method tasks\(\), and looks like Gymnasium's interface.*environment.name=gymnasium"),
    ],
)
def test_a_class_without_its_methods_is_refused_with_all_of_them(names, says):
    methods = dict.fromkeys(names) | {"reset": lambda self, *, seed=None, options=None: ("a", {})}
    with pytest.raises(ConfigError, match=says):
        game(**methods)


def test_a_class_of_trl_is_told_its_name():
    with pytest.raises(ConfigError, match=r"TRL's environment_factory.*environment.name=trl"):
        game(tasks=None, get_reward=lambda self: 1.0)


def add(number: int) -> str:
    """Add a number.

    Args:
        number: The number.
    """
    return str(number)


SCHEMA = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
CALL = {"name": "add", "arguments": {"number": 2}}


@pytest.mark.parametrize(
    "tools",
    [[add], (add,), {"add": add}, [SCHEMA], (SCHEMA,), [SCHEMA["function"]]],
    ids=["list", "tuple", "dict", "schemas", "tuple of schemas", "bare schemas"],
)
def test_tools_are_functions_or_schemas_in_any_list(tools):
    """Each becomes a schema of the form of chat templates."""
    seen = game(tools=tools).reset(Task("7", data={"listed": 7}), 0)

    assert [tool["function"]["name"] for tool in seen.tools] == ["add"]
    assert all(tool["type"] == "function" for tool in seen.tools)


@pytest.mark.parametrize(
    ("calls", "said", "results", "text"),
    [
        (1, "2", ("2",), ""),
        (2, ["2", "3"], ("2", "3"), ""),
        (1, ["2"], ("2",), ""),
        (0, "Thanks.", (), "Thanks."),
    ],
)
def test_a_text_is_the_result_of_the_call(calls, said, results, text):
    """And a list has one for each."""
    world = game(tools=[add], step=lambda self, action: said)
    world.reset(world.tasks("train")[0], 0)

    seen = world.step(write_action(ToolAction("", (ToolCall("add", {"number": 2}),) * calls)))

    assert (seen.results, seen.text) == (results, text)


@pytest.mark.parametrize(
    "written",
    [
        CALL,
        [CALL],
        {"calls": [CALL]},
        {"text": "", "calls": [CALL]},
        {"type": "function", "function": CALL},
        json.dumps(CALL),
        json.dumps({"text": "", "calls": [CALL]}),
        f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        ToolCall("add", {"number": 2}),
        ToolAction("", (ToolCall("add", {"number": 2}),)),
    ],
    ids=str,
)
def test_an_expert_writes_a_call_as_step_gets_it(written):
    """However it is spelled, the policy is taught the call, and the world is sent the same JSON."""
    said = game(tools=[add], expert=lambda self, task: [written]).expert(Task("7", data={"listed": 7}))

    command = FORMATS["tools"].parse(FORMATS["tools"].write("", said[0]))
    assert read_action(command) == ToolAction("", (ToolCall("add", {"number": 2}),))
    assert json.loads(command) == {"text": "", "calls": [CALL]}


def test_a_message_that_is_json_is_no_call():
    """An object with a name alone may be an answer."""
    assert read_action('{"name": "Bob"}') is None


def test_an_error_of_every_split_is_no_missing_split():
    """The mistake in `tasks` is the message; a split that is missing is named with those that were tried."""

    def torn(self, split):
        raise ZeroDivisionError("division by zero")

    with pytest.raises(ConfigError, match=r"no tasks for split 'train': ZeroDivisionError.*of every split"):
        first_split(game(tasks=torn))
    with pytest.raises(ConfigError, match=r"name one of its own\. Of the last: .*KeyError: 'train'"):
        first_split(game(tasks=lambda self, split: {"mine": [1]}[split]))


def test_a_game_that_fails_under_a_person_exits_with_1(tmp_path, monkeypatch, capsys):
    """The message is that of the game."""
    (tmp_path / "torn.py").write_text(
        "class Torn:\n"
        "    def tasks(self, split): return ['a']\n"
        "    def reset(self, task): return 'Go.'\n"
        "    def step(self, action): return self.nothing\n"
    )
    monkeypatch.setattr("sys.argv", ["perturn", "play", f"{tmp_path}/torn.py:Torn"])
    monkeypatch.setattr("sys.stdin", io.StringIO("north\n"))

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 1
    assert "no attribute 'nothing'" in capsys.readouterr().out


def test_files_of_one_name_are_told_apart(tmp_path):
    """As is a file that has the name of a package."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("same", "json"):
            (tmp_path / folder / f"{name}.py").write_text(f"class World:\n    where = {folder!r}\n")

    found = [
        load_object(f"{tmp_path}/{each}.py:World").where for each in ("a/same", "b/same", "a/json", "b/json")
    ]

    assert found == ["a", "b", "a", "b"]
    assert load_object("json:dumps") is json.dumps


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("game.py:Gane", "has no 'Gane'.*Did you mean 'Game'?"),
        ("game.py", "names no class; write it as game.py:CLASS. Known: Game"),
        ("gone.py:Game", "there is no file gone.py in"),
        ("broken.py:Game", r"NameError: .*\(at broken.py:2\)"),
        ("game.py:made", "must be a class, or a function that makes the world, got "),
    ],
)
def test_a_wrong_name_is_explained(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text("class Game:\n    pass\n\nmade = Game()\n")
    (tmp_path / "broken.py").write_text("x = 1\ny = z\n")

    with pytest.raises(ConfigError, match=says):
        make_environment({"name": name})


def test_problems_are_all_told_in_one_round():
    """Of the name, the tasks, the reset, each kind of step and the expert."""

    class Bad:
        name = ""

        def tasks(self, split):
            return [1, 1]

        def reset(self, task):
            return "go", 1.0

        def step(self, action):
            return None if action == "help" else int(action)

        def expert(self, task):
            return [3]

    told = "\n".join(check_environment(Bad))

    for part in (
        "name must be",
        "repeats the id",
        "reset('1', seed=0) returned",
        "ValueError",
        "returned None",
    ):
        assert part in told
    assert "expert must return texts, got [3]" in told


def test_the_border_is_passed_once():
    world = OwnWorld(Guess(), "Guess")

    assert at_border(world, "Guess") is world


def test_a_task_whose_data_has_the_key_of_listed_values_is_refused():
    """Reset would get the value under that key in place of the task."""
    world = game(tasks=lambda self, split: [Task("t", data={"listed": "a, b"})])

    with pytest.raises(EnvironmentFailure, match="Task t has the key 'listed'"):
        world.tasks("train")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("x = 1\ny = [][0]\n", "(at {file}:2); correct this line."),
        ("x = (\n", "({name}, line 1); correct this line."),
        ("class Other:\n    pass\n", "write it as module:Class or file.py:Class. Known: Other"),
    ],
    ids=["raises", "is not Python", "has another class"],
)
def test_a_file_that_cannot_be_loaded_is_to_be_corrected(tmp_path, text, remedy):
    """A class that is not in it is to be named otherwise."""
    file = tmp_path / f"broken{len(text)}.py"
    file.write_text(text)

    with pytest.raises(ConfigError) as refused:
        load_object(f"{file}:World")

    assert remedy.format(file=file, name=file.name) in str(refused.value)


def test_training_tasks_are_scored_only_with_the_reason(capsys):
    """A split that is missing, and a mistake in `tasks`, look alike."""

    def torn(self, split):
        return [1, 2] if split == "train" else [1 / 0]

    assert evaluation_split(game(tasks=torn)) == "train"
    assert "evaluation takes tasks of split 'train': " in (said := capsys.readouterr().err)
    assert "no tasks for split 'test': ZeroDivisionError" in said
