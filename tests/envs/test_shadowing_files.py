"""Environments in files that have the name of a module of Python or of a library."""

import subprocess
import sys

import pytest

from perturn.config.sections import Worlds
from perturn.envs.world_process import runs_here

GAME = """
from perturn.extend import EnvironmentTraits

class Game:
    traits = EnvironmentTraits(in_process=True)
    def tasks(self, split): return ["a"]
    def reset(self, task): return f"Task {task}"
    def step(self, action): return "on", 1, True
"""


def printed(code, folder):
    """Return what a program in a folder prints."""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["random", "select"])
def test_a_file_may_have_the_name_of_a_standard_module(tmp_path, name):
    """Perturn imports its own modules in a new process, before it imports the file."""
    (tmp_path / f"{name}.py").write_text(GAME)
    code = (
        "from perturn.config.sections import Worlds; from perturn.envs.world_process import ProcessWorlds; "
        f"from perturn.io.user_code import load_object; load_object('{name}.py:Game'); "
        f"world = ProcessWorlds({{'name': '{name}.py:Game'}}, Worlds())(); "
        "print(world.reset(world.tasks('train')[0], 0).text); world.close()"
    )

    assert printed(code, tmp_path) == "Task a"


def test_a_file_with_the_name_of_a_library_does_not_replace_it(tmp_path):
    """The library is imported later, by other code."""
    (tmp_path / "typer.py").write_text(GAME)
    code = (
        "from perturn.io.user_code import load_object; load_object('typer.py:Game'); import sys, typer; "
        "assert load_object('typer.py:Game') is load_object('typer.py:Game'); print(typer.Typer.__name__)"
    )

    assert printed(code, tmp_path) == "Typer"


def test_traits_of_a_class_in_a_file_count(tmp_path):
    """Its worlds run in threads, unless the recipe says otherwise."""
    (tmp_path / "own_traits_game.py").write_text(GAME)
    section = {"name": f"{tmp_path}/own_traits_game.py:Game"}

    assert runs_here(section, Worlds())
    assert not runs_here(section, Worlds(processes=1))
