"""Mistakes in classes of the user's: the error names the class and what it must return, or the line that raised."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from perturn import cli, weigh
from perturn.config.outside_files import named_inputs
from perturn.config.parsing import build, parse
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import Made, RowInputs, rows_made
from perturn.credit import CREDITS
from perturn.errors import ConfigError
from perturn.explore.branches import Branches
from perturn.explore.protocol import ExploreInputs, Explorer, jobs_of
from perturn.io.user_code import load_object
from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.protocol import loss_values, row_rewards
from perturn.rows.group_pairs import GroupPairs
from perturn.table import check_names, guarded
from perturn.table_index import describe
from perturn.types import Action, Task, Trajectory, Turn
from support.guests import added

SIDE = TurnLogprobs.from_nested([[[-1.0, -2.0], [-0.5]], [[-1.0]]], [[[-1.0, -2.0], [-0.5]], [[-1.0]]])


class _Given(LOSSES["dpo"]):
    """A loss that returns what it was given."""

    def __call__(self, chosen, rejected):
        return self.given

    def rewards(self, side):
        return self.given


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.tensor(0.5), "[]"),
        (torch.zeros(4), "[4]"),
        (torch.zeros(2, 2), "[2, 2]"),
        (torch.zeros(2, dtype=torch.long), "tensor([0, 0])"),
        ([0.5, 0.5], "[0.5, 0.5]"),
        (None, "None"),
    ],
)
def test_a_loss_returns_a_number_for_each_row(given, got):
    """A mean over the rows would be averaged once more, and training would take steps that are too small."""
    loss = _Given()
    object.__setattr__(loss, "given", given)
    must = r"must return a tensor of floating-point numbers \[2\], one for each row, got " + re.escape(got)

    with pytest.raises(ConfigError, match=f"loss _Given {must}"):
        loss_values(loss, SIDE, SIDE)
    with pytest.raises(ConfigError, match=f"rewards of loss _Given {must}"):
        row_rewards(loss, SIDE)


def test_a_loss_of_the_right_shape_is_returned_as_it_is():
    assert loss_values(LOSSES["dpo"](), SIDE, SIDE).tolist() == pytest.approx([0.6931, 0.6931], abs=1e-4)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Made(one for one in ()), "the rows of row maker Mine must be a list, got <generator"),
        (Made([], [1]), "the counts of row maker Mine must be a mapping, got [1]"),
    ],
)
def test_a_row_maker_returns_lists(made, says):
    """A generator would be empty when it is read the second time, and all rows would be lost."""
    mine = type("Mine", (GroupPairs,), {"__call__": lambda self, inputs: made})()

    with pytest.raises(ConfigError, match=re.escape(says)):
        rows_made(mine, RowInputs())


def tasks():
    return [Task("a"), Task("b")]


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        (lambda all_of: None, "must be a list, got None"),
        (lambda all_of: (one for one in all_of), "must be a list, got <generator"),
        (lambda all_of: tasks(), "must be of class Job, as make_jobs returns them, got Task("),
        (
            lambda all_of: [*all_of, all_of[0]],
            "must have different sample numbers for each task, got ('a', 0)",
        ),
    ],
)
def test_an_explorer_returns_jobs(jobs, says):
    @dataclass(frozen=True)
    class Mine(Explorer):
        def jobs(self, inputs, number):
            return jobs(super().jobs(inputs, number))

    with pytest.raises(ConfigError, match=re.escape(f"the jobs of explorer Mine {says}")):
        jobs_of(Mine(), ExploreInputs(0, tasks=tasks()), 0)


@pytest.mark.parametrize(
    ("turns", "says"),
    [([-1], "got -1"), ([2], "got 2"), (["1"], "got '1'"), (1, "must be a sequence of turns, got 1")],
)
def test_branching_turns_are_turns_of_the_episode(turns, says):
    """A turn of -1 would be the last one."""

    @dataclass(frozen=True)
    class Mine(Branches):
        def turns_of(self, one):
            return turns

    begun = [Trajectory(Task("a"), (Turn((), Action("go")),) * 2)]

    with pytest.raises(ConfigError, match=f"turns_of of explorer Mine .*{re.escape(says)}"):
        Mine().choose(ExploreInputs(0, begun=begun))


BAD = '''"""A credit of a user."""

from perturn.extend.tensors import GroupCredit


class Bad(GroupCredit):
    """It raises."""

    def __call__(self, group, **_):
        return [][3]


class Plain(GroupCredit):
    """A setting without a decorator."""

    slope: float = 1.0
'''


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """The folder of a file with credits that cannot work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_credit_of_a_user.py").write_text(BAD)
    return tmp_path


@pytest.mark.usefixtures("bad")
def test_an_exception_of_the_users_class_has_its_line():
    """So has an exception of a library that this line calls; others have none."""
    credit = load_object("bad_credit_of_a_user.py:Bad")()

    with (
        pytest.raises(ConfigError, match=r"it failed: IndexError: .* \(at bad_credit_of_a_user\.py:10\)"),
        guarded("it failed"),
    ):
        credit([])
    with pytest.raises(ConfigError, match=r"it failed: KeyError: 'x'$"), guarded("it failed"):
        CREDITS["x"]


@pytest.mark.usefixtures("bad")
def test_the_command_line_prints_the_line_that_raised(monkeypatch, capsys):
    """Exceptions of Perturn itself are still raised with their traceback."""
    credit = load_object("bad_credit_of_a_user.py:Bad")()
    monkeypatch.setattr(cli, "app", lambda: credit([]))
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    printed = " ".join(capsys.readouterr().err.split())
    assert (
        "error: IndexError: list index out of range (at bad_credit_of_a_user.py:10); correct this line."
        in printed
    )

    monkeypatch.setattr(cli, "app", lambda: CREDITS["no such credit"])
    with pytest.raises(KeyError):
        cli.main()


@pytest.mark.usefixtures("bad")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad_credit_of_a_user.py", "Name the class in the file, as bad_credit_of_a_user.py:Class."),
        (
            "bad_credit_of_a_user.py:Plain",
            "credit Plain has 'slope', which is no setting without a decorator",
        ),
        (
            {"name": "bad_credit_of_a_user.py:Plain", "slope": 1.0},
            "class Plain has 'slope', which is no setting without a decorator",
        ),
    ],
)
def test_a_credit_in_a_file_is_a_class_with_a_decorator(name, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        weigh([Trajectory(Task("a"), ())], name)


def test_a_type_that_is_imported_for_checkers_alone_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hinted_credit_of_a_user.py").write_text(
        "from __future__ import annotations\n\nfrom typing import TYPE_CHECKING\n\n"
        "if TYPE_CHECKING:\n    from collections import OrderedDict\n\n\n"
        "class Hinted:\n    def __init__(self, table: OrderedDict | None = None):\n        pass\n"
    )

    says = r"settings of .*Hinted'> cannot be read: NameError: .*'OrderedDict'.*; import the name outside of"
    with pytest.raises(ConfigError, match=says):
        weigh([Trajectory(Task("a"), ())], "hinted_credit_of_a_user.py:Hinted")


def test_a_class_is_no_credit():
    with pytest.raises(ConfigError, match=r"credit must be a name, a section, or an object such as Mine\(\)"):
        weigh([Trajectory(Task("a"), ())], CREDITS["rloo"])


def test_a_credit_of_groups_without_a_formula_says_what_to_write():
    credit = type("Mine", (load_object("perturn.extend.tensors:GroupCredit"),), {})()

    with pytest.raises(NotImplementedError, match="overrides __call__ or _weigh"):
        credit([Trajectory(Task("a"), (Turn((), Action("go")),), sample=n) for n in range(2)])


QUANTITY = '''"""A quantity of a user, and a credit that reads it."""

from perturn.extend.quantity_tools import Computed, Quantity, QuantityTraits
from perturn.extend.tensors import GroupCredit


class Novelty(Quantity):
    """A number for each turn."""

    traits = QuantityTraits("none")

    def compute(self, request, episodes, source):
        return Computed([])
'''
READER = '''"""A credit that reads a quantity in another file."""

from perturn.extend.tensors import GroupCredit


class Reader(GroupCredit):
    """It reads."""

    needs = ("quantity_of_a_user.py:Novelty",)
'''


def test_the_file_of_a_quantity_is_an_input_of_the_run(tmp_path, monkeypatch):
    """Otherwise a run would go on with another quantity after the file has changed."""
    monkeypatch.chdir(tmp_path)
    Path("quantity_of_a_user.py").write_text(QUANTITY)
    Path("reader_of_a_user.py").write_text(READER)
    recipe = {"name": "mine", "model": {"name": "tiny"}, "environment": {"name": "alfworld-like"}}
    recipe |= {"credit": {"name": "reader_of_a_user.py:Reader"}, "explore": {"samples": 2}}
    recipe |= {"rows": {"name": "groups"}, "align": {"loss": {"name": "ppo-clip"}}}

    found = {one.setting: one.text for one in named_inputs(parse(Recipe, recipe))}

    assert found["credit.name"] == "reader_of_a_user.py:Reader"
    assert found["credit.needs[0]"] == "quantity_of_a_user.py:Novelty"


def test_a_broken_entry_of_a_package_hides_no_others(monkeypatch):
    with added("perturn.credits", broken=type("Broken", (), {})):
        monkeypatch.delattr(sys.modules["guest_of_a_test"], "broken")
        found = describe("credits")

    assert found["broken"].startswith("cannot be loaded: 'broken' of ")
    assert "minus the mean score" in found["rloo"]
    assert build(CREDITS, {"name": "rloo"}, "credit")
    assert CliRunner().invoke(cli.app, ["list", "credits"]).exit_code == 0


def test_a_constant_of_an_environment_needs_no_decorator():
    """An environment takes its settings in `__init__`, so its class may have any constants."""

    class World:
        limit: int = 5

    check_names(World, kind="environment", known=("tasks",), overrides=False)
    with pytest.raises(
        ConfigError, match="selector World has 'limit', which is no setting without a decorator"
    ):
        check_names(World, kind="selector", known=("tasks",))
