"""Abilities: optional methods of an environment are forwarded to processes and nodes by their signature alone."""

import json

import pytest

from envs.in_processes import LIMITS
from perturn.cluster.node_servers import WorldServer
from perturn.config.sections import Worlds
from perturn.envs.abilities import ABILITIES, abilities_of, ability, lacks
from perturn.envs.load_environment import make_environment
from perturn.envs.remote_worlds import RemoteWorld, rules_of, value_of
from perturn.envs.world_process import ProcessWorlds
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.types import Task

GAME = '''
"""A game with abilities that Perturn has never heard of."""
from perturn.traits import Ability, EnvironmentTraits
from perturn.types import Observation, Task


class Game:
    """Say yes."""

    traits = EnvironmentTraits(
        abilities={
            "hint": Ability(("task", "plain"), "plain"),
            "easier": Ability(("task",), "task", or_none=True),
            "script": Ability(("actions",), "turns"),
            "here": Ability((), "plain", crosses=False),
        }
    )

    def tasks(self, split):
        return [{"id": f"t/{n}", "word": "yes", "n": n} for n in range(3)]

    def reset(self, task):
        return f"Say {task['word']}."

    def step(self, action):
        return "over", float(action == "yes"), True

    def expert(self, task):
        return [task["word"]]

    def hint(self, task, letters):
        return {"begins": task["word"][:letters], "n": task["n"]}

    def easier(self, task):
        return Task("t/0", data={"word": "y"}) if task["n"] else None

    def script(self, actions):
        return [("I think.", action) for action in actions] if actions else "ab"

    def here(self):
        return 1
'''


class _Node:
    """A link to a world of a node's server, where Ray would carry what crosses."""

    def __init__(self, section, limits):
        self._server = WorldServer(section, limits)
        self.facts = self._carried(self._server.start(1))

    def call(self, method, *arguments):
        return self._carried(self._server.call(0, method, *json.loads(json.dumps(arguments))))

    def close(self):
        self._carried(self._server.close(0))

    def _carried(self, reply):
        return value_of(json.loads(json.dumps(reply)))


@pytest.fixture(params=["here", "process", "node", "process of a node"])
def everywhere(request):
    """Makes a world of a section: in this process, in one of its own, and on a node in both ways."""
    made = []

    def make(section):
        if request.param == "here":
            made.append(make_environment(section))
        elif request.param == "process":
            made.append(ProcessWorlds(section, LIMITS)())
        else:
            made.append(RemoteWorld(_Node(section, Worlds(processes=int(request.param != "node")))))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_ability_of_a_users_own_is_called_everywhere(everywhere, tmp_path):
    """By its signature alone: a listed value comes back to the game as it was listed, tuples stay tuples."""
    (tmp_path / "abilities_game.py").write_text(GAME)
    world = everywhere({"name": f"{tmp_path}/abilities_game.py:Game"})
    first, second, _ = world.tasks("train")

    assert abilities_of(world) - {"here"} == {"expert", "hint", "easier", "script"}
    assert ability(world, "expert")(second) == ["yes"]
    assert ability(world, "hint")(second, 2) == {"begins": "ye", "n": 1}
    assert ability(world, "easier")(second) == Task("t/0", data={"word": "y"})
    assert ability(world, "easier")(first) is None
    assert ability(world, "script")(["go", "on"]) == [("I think.", "go"), ("I think.", "on")]
    assert rules_of(world)["system"][0] == "Say yes."
    assert ("here" in abilities_of(world)) == (not isinstance(world, RemoteWorld))


def test_abilities_of_ours_answer_elsewhere_as_here(everywhere):
    """All of the table that crosses, by an environment that has them."""
    section = {"name": "alfworld-like"}
    world, here = everywhere(section), make_environment(section)
    task = here.tasks("valid_seen")[0]
    actions = [action for _, action in here.demonstration(task)]
    for name, arguments in {
        "expert": (),
        "demonstration": (),
        "clumsy": (7,),
        "aimless": (7, 5),
        "remaining": (actions[:2], "shortest"),
        "correct": (["look", *actions[:1]],),
    }.items():
        assert ability(world, name)(task, *arguments) == list(getattr(here, name)(task, *arguments)), name

    assert abilities_of(world) == {name for name, each in ABILITIES.items() if each.crosses}


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("[1]", r"expert must return texts, got \[1\]"),
        ("None", "expert must return texts, got None"),
        ("'abc'", "expert must return texts, got 'abc'"),
        ("7", "expert must return texts, got 7"),
    ],
)
def test_a_result_of_another_form_is_a_failure_of_the_world(tmp_path, result, says):
    (tmp_path / "wrong_game.py").write_text(GAME.replace('[task["word"]]', result))
    world = RemoteWorld(_Node({"name": f"{tmp_path}/wrong_game.py:Game"}, Worlds(processes=0)))

    with pytest.raises(EnvironmentFailure, match=says):
        ability(world, "expert")(world.tasks("train")[0])
    with pytest.raises(EnvironmentFailure, match=r"script must return \(thought, action\) texts, got 'ab'"):
        ability(world, "script")([])


def test_who_lacks_an_ability_is_told_who_has_it(everywhere, tmp_path):
    """The others are found in the table of environments."""
    (tmp_path / "lacking_game.py").write_text(GAME)
    world = everywhere({"name": f"{tmp_path}/lacking_game.py:Game"})

    assert lacks(world, "expert") == ""
    assert lacks(world, "expert", "correct", "clumsy") == (
        "environment Game has no method correct() and clumsy() (see perturn.envs.abilities); take alfworld or "
        "alfworld-like"
    )
    with pytest.raises(ConfigError, match=r"has no method teach\(\) \(see perturn.envs.abilities\)\.$"):
        ability(world, "teach")
