"""Rules of a plain game: what its class declares, and what is refused."""

import abc

import numpy as np
import pytest

from perturn.cli import main
from perturn.config.sections import Worlds
from perturn.envs.remote_worlds import declared_rules
from perturn.envs.user_environment import at_border
from perturn.envs.world_process import ProcessWorlds
from perturn.errors import ConfigError
from perturn.run.protocol_rules import rules_for
from perturn.types import EpisodeProtocol, Task
from support.guess import Guess, game


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, {"system": "Guess a number.\n\nIt is whole."}),
        (
            {"max_turns": 5, "format": "react", "system": "Go."},
            {"max_turns": 5, "format": "react", "system": "Go."},
        ),
        ({"protocol": "alfworld-eto"}, {"name": "alfworld-eto"}),
        ({"protocol": {"max_turns": 3, "system": "Go."}, "max_turns": 4}, {"max_turns": 4, "system": "Go."}),
        ({"format": lambda self: 1}, {"system": "Guess a number.\n\nIt is whole."}),
    ],
)
def test_rules_are_read_off_the_class(attributes, expected):
    """Attributes before `protocol`, and the docstring up to its first section."""
    world = at_border(type("Game", (Guess,), {"__doc__": Guess.__doc__, **attributes})(), "Game")

    assert {key: value for key, (value, _) in declared_rules(world).items()} == expected


def test_a_turn_limit_below_one_is_rejected():
    """A class that says something is not answered with the default."""
    with pytest.raises(ConfigError, match=r"max_turns must be >= 1, got 0"):
        rules_for(None, game(max_turns=0), lambda: Task("1"))


def test_rules_are_checked_beside_other_problems(tmp_path, monkeypatch, capsys):
    """One round of check-env: a step that raises, and a misspelt setting."""
    (tmp_path / "two.py").write_text(
        "class Two:\n"
        "    protocol = {'max_turn': 3}\n"
        "    def tasks(self, split): return ['a']\n"
        "    def reset(self, task): return 'Go.'\n"
        "    def step(self, action): return self.nothing\n"
    )
    monkeypatch.setattr("sys.argv", ["perturn", "check-env", f"{tmp_path}/two.py:Two"])

    with pytest.raises(SystemExit) as ended:
        main()

    said = capsys.readouterr().out
    assert ended.value.code == 1
    assert "no attribute 'nothing'" in said
    assert "Did you mean 'protocol.max_turns'?" in said


def test_a_protocol_object_is_taken_whole():
    rules = EpisodeProtocol("mine", "action", "Go.", max_turns=9)

    found = declared_rules(game(protocol=rules))

    assert (found["name"][0], found["max_turns"]) == ("mine", (9, "protocol of Game"))
    with pytest.raises(ConfigError, match="must be the name of a protocol, a dict"):
        declared_rules(game(protocol=7))


def test_rules_cross_to_a_world_in_a_process(tmp_path):
    """So does the game itself."""
    (tmp_path / "far_game.py").write_text(
        'class Far:\n    """Go far."""\n    max_turns = 2\n'
        "    def tasks(self, split): return ['a']\n"
        "    def reset(self, task): return f'Task {task}'\n"
        "    def step(self, action): return 'on', 1, True\n"
    )
    world = ProcessWorlds({"name": f"{tmp_path}/far_game.py:Far"}, Worlds())()

    assert world.reset(world.tasks("train")[0], 0).text == "Task a"
    assert world.step("x").success
    assert world.declared() == {
        "max_turns": (2, "max_turns of Far"),
        "system": ("Go far.", "docstring of Far"),
    }
    world.close()


def test_a_subclass_has_the_docstring_and_the_numbers_of_its_base():
    """A number of numpy counts too."""
    base = type("Base", (Guess,), {"__doc__": "Guess.", "max_turns": np.int64(6)})

    found = declared_rules(at_border(type("Harder", (base,), {})(), "Harder"))

    assert {key: value for key, (value, _) in found.items()} == {"max_turns": 6, "system": "Guess."}


def test_the_docstring_of_a_library_is_no_system_text():
    """Such as the docstring of abc.ABC."""
    methods = {name: value for name, value in vars(Guess).items() if callable(value)}
    mine = type("Mine", (abc.ABC,), methods)

    assert "system" not in declared_rules(at_border(mine(), "Mine"))


def test_check_env_takes_settings_of_the_class(tmp_path, monkeypatch, capsys):
    (tmp_path / "sized.py").write_text(
        "class Sized:\n"
        "    def __init__(self, size: int): self.size = size\n"
        "    def tasks(self, split): return list(range(self.size))\n"
        "    def reset(self, task): return f'Task {task}'\n"
        "    def step(self, action): return 'on', 1, True\n"
    )
    monkeypatch.setattr(
        "sys.argv", ["perturn", "check-env", f"{tmp_path}/sized.py:Sized", "environment.size=2"]
    )

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_turns": "5"}, "max_turns of Game must be a whole number, got '5'."),
        ({"max_turns": 2.5}, "max_turns of Game must be a whole number, got 2.5."),
        ({"max_turns": True}, "max_turns of Game must be a whole number, got True."),
        ({"system": 3}, "system of Game must be text, got 3."),
    ],
)
def test_a_rule_of_a_class_that_has_the_wrong_type_is_refused(wrong, says):
    """Else the game would be played by the default, although its class says something."""
    with pytest.raises(ConfigError) as raised:
        declared_rules(game(**wrong))

    assert str(raised.value).startswith(says)
