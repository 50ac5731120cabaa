"""The surface that entries of other packages import, and the contract that ours import nothing else."""

import re
import tomllib
from dataclasses import fields
from fnmatch import fnmatch

import pytest
from entries import surface

import perturn.extend
import perturn.extend.quantity_tools
import perturn.extend.tensors
from perturn.config.explorer_settings import _MEMBERS
from perturn.engines import protocol
from perturn.extend import Explorer
from support.docs import ROOT

MODULES = [perturn.extend, perturn.extend.tensors, perturn.extend.quantity_tools]


def test_every_name_is_documented():
    """On the page, by the first line of its own documentation."""
    lines = [line for line in surface().splitlines() if line.startswith("| `")]

    assert [line for line in lines if re.fullmatch(r"\| `\w+` \| *\|", line)] == []
    assert len(lines) == sum(len(module.__all__) for module in MODULES)


def test_all_that_an_engine_may_implement_is_there():
    """Its optional methods, and the error that ends an episode at a full context."""
    own = {name for name, each in vars(protocol).items() if "protocol" in getattr(each, "__module__", "")}

    assert own | {"ContextFull"} <= set(perturn.extend.__all__)


def test_a_name_means_one_thing():
    """In all modules of the surface."""
    names = [name for module in MODULES for name in module.__all__]

    assert sorted(names) == sorted(set(names))


def test_the_contract_names_all_other_packages():
    """So that a new package is not open to `perturn.methods` before somebody decides so."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(each for each in contracts if each["name"] == "methods import what everybody may import")
    source = ROOT / "src/perturn"
    modules = {path.parent.name for path in source.glob("*/__init__.py")} | {
        path.stem for path in source.glob("*.py") if not path.name.startswith("__")
    }

    assert found["forbidden_modules"] == [
        f"perturn.{name}" for name in sorted(modules - {"methods", "extend"})
    ]


@pytest.mark.parametrize("group", ["credits", "quantities", "explorers", "rows"])
def test_entry_points_lie_where_single_papers_are(group):
    """And the tables of the core name none of them."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        f"perturn.{group}"
    ]
    folder = {"credits": "credit", "explorers": "explore"}.get(group, group)
    own = (ROOT / f"src/perturn/{folder}/__init__.py").read_text()

    assert all(where.startswith("perturn.methods.") for where in points.values())
    assert "perturn.methods" not in own
    assert list(points) == sorted(points), "write the entry points of a group in alphabetical order"


def listed(module, patterns):
    """Whether a contract names a module, by itself or as `package.*`."""
    return any(fnmatch(module, pattern) for pattern in patterns)


@pytest.mark.parametrize("group", ["explorers", "rows"])
def test_the_contract_on_torch_names_who_plays_and_who_makes_rows(group):
    """Each new file of `perturn.methods` is added to it by hand."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules = {
        where.partition(":")[0] for where in found["project"]["entry-points"][f"perturn.{group}"].values()
    }
    contract = next(
        each
        for each in found["tool"]["importlinter"]["contracts"]
        if each["name"].startswith("what plays episodes")
    )

    assert [each for each in sorted(modules) if not listed(each, contract["source_modules"])] == []


def test_a_module_that_no_contract_names_is_found():
    assert listed("perturn.methods.ipr.step_pairs", ["perturn.methods.ipr.*"])
    assert not listed("perturn.methods.mine", ["perturn.extend", "perturn.methods.ipr.*"])


def test_a_credit_does_not_import_what_reads_models():
    """`perturn.extend.quantity_tools` loads transformers, for which a command that lists credits would wait."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "perturn.credits"
    ]
    modules = {where.partition(":")[0] for where in points.values()}

    for module in modules:
        assert "quantity_tools" not in (ROOT / f"src/{module.replace('.', '/')}.py").read_text(), module


def test_names_of_an_explorer_are_told_apart_by_all_of_its_members():
    """The list stands below the protocol, so that a recipe can be read without it."""
    classes = Explorer.__mro__[:-1]
    declared = {name for each in classes for name in (*vars(each), *vars(each).get("__annotations__", ()))}
    settings = {each.name for each in fields(Explorer)}

    assert {name for name in declared - settings if not name.startswith("_")} | {"imposed"} == _MEMBERS
