"""Tables that packages of others add to, and what goes wrong with one; `test_guest.py` runs such a package."""

import json
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoints
from typing import ClassVar

import pytest

import perturn.table
from perturn.cli import main
from perturn.errors import ConfigError
from perturn.table import Table, check_names, locate, missing_methods, name_of, package_of
from perturn.training.credit_choice import make_credit
from support.guests import describe, read_again

HELPER = " Begin the name of a helper with `_`."


def install(folder, monkeypatch, entries):
    """Install a package that adds entries to a group."""
    describe(folder, "perturn-other", "1", {"perturn.things": entries})
    monkeypatch.syspath_prepend(folder)


def test_an_entry_with_a_name_that_is_taken_is_refused(tmp_path, monkeypatch):
    """Which of two is meant must not depend on the order of folders."""
    install(tmp_path, monkeypatch, {"one": "collections:OrderedDict"})
    table = Table("perturn.things", {"one": int})

    with pytest.raises(
        ConfigError,
        match=r"package perturn-other adds to perturn.things the name 'one', and that name is taken",
    ):
        table["one"]


def test_where_our_own_entry_points_are_missing_errors_say_so():
    """As in a checkout that was installed before its entries became entry points."""
    assert missing_methods() == ""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(perturn.table, "_entry_points", lambda **wanted: EntryPoints())
        read_again()
        with pytest.raises(
            ConfigError, match=r"unknown credit\.name 'igpo'.* run `pip install` for Perturn again"
        ):
            make_credit({"name": "igpo"})
    read_again()


def test_of_two_packages_with_one_name_ours_is_not_to_blame(tmp_path, monkeypatch):
    """Whatever the order of folders."""
    describe(tmp_path, "perturn-other", "1", {"perturn.credits": {"igpo": "collections:OrderedDict"}})
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(
        ConfigError,
        match=r"package perturn-other adds to perturn\.credits the name 'igpo', and that name is taken",
    ):
        Table("perturn.credits", {})["igpo"]


@pytest.mark.parametrize(
    ("where", "says"),
    [("no_such_module:x", "ModuleNotFoundError"), ("collections:NoSuchThing", "AttributeError")],
)
def test_an_entry_that_cannot_be_imported_says_whose_it_is(tmp_path, monkeypatch, where, says):
    """The other entries stay usable."""
    install(tmp_path, monkeypatch, {"broken": where})
    table = Table("perturn.things", {"one": "builtins:int"})

    with pytest.raises(
        ConfigError, match=f"'broken' of package perturn-other cannot be loaded from .*{says}"
    ):
        table["broken"]

    assert table["one"] is int
    assert (package_of("perturn.things", "broken"), package_of("perturn.things", "one")) == (
        "perturn-other",
        None,
    )


def test_templates_are_listed_with_what_was_changed(monkeypatch, capsys):
    """`perturn list templates` says whose each is."""
    monkeypatch.setattr("sys.argv", ["perturn", "list", "templates", "--json"])

    with pytest.raises(SystemExit) as caught:
        main()

    listed = json.loads(capsys.readouterr().out)
    assert not caught.value.code
    assert listed["qwen3"].startswith("Qwen3. Changed: thoughts stay in every turn")
    assert listed["llama3"] == "Llama 3. Changed: nothing. No tools."


def test_the_recipes_of_the_package_are_listed_with_their_first_comment(monkeypatch, capsys):
    """`perturn list recipes`: each by the name of its file."""
    monkeypatch.setattr("sys.argv", ["perturn", "list", "recipes", "--json"])

    with pytest.raises(SystemExit) as caught:
        main()

    listed = json.loads(capsys.readouterr().out)
    assert not caught.value.code
    assert listed["scienceworld_tlm-dre_demo"] == "tlm-DRE on ScienceWorld with a 135M model."
    assert all(listed.values())


def test_an_object_is_located_by_module_and_name():
    assert locate("perturn.table:Table") is Table


@dataclass(frozen=True)
class _Traits:
    needs_group: bool = False
    unbiased: bool = False


class _Protocol:
    step = steps = None


class _Misspelt(_Protocol):
    need_group = True


class _Beside(_Protocol):
    needs_group = True


class _Declared:
    needs = traits = ()


class _Kept(_Declared):
    need = ("entropy",)


class _Override(_Protocol):
    def stepp(self) -> None: ...


class _OfMember:
    def forgett(self) -> None: ...


@dataclass(frozen=True)
class _Settings:
    needs_groups: bool = True
    export: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            _Misspelt,
            "credit _Misspelt has 'need_group', which is never read. Did you mean `_Traits(needs_group=...)`?",
        ),
        (
            _Beside,
            "credit _Beside has 'needs_group', which is never read. Did you mean `_Traits(needs_group=...)`?",
        ),
        (_Kept, "credit _Kept has 'need', which is never read. Did you mean `needs`?"),
        (_Override, "credit _Override has 'stepp', which is never read. Did you mean `step`?" + HELPER),
        (_OfMember, "credit _OfMember has 'forgett', which is never read. Did you mean `forget`?" + HELPER),
    ],
)
def test_an_attribute_that_nobody_reads_is_rejected(entry: type, says: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        check_names(
            entry, kind="credit", known=("step", "forget", "expert", "needs", "traits"), traits=_Traits
        )


@pytest.mark.parametrize("entry", [_Protocol, _Settings])
def test_settings_and_names_beside_the_right_one_are_allowed(entry: type):
    """`steps` is beside `step`; `needs_groups` is a setting; `export` is not like enough to `expert`."""
    check_names(entry, kind="credit", known=("step", "forget", "expert"), traits=_Traits)


class _Far(_Protocol):
    def steer(self) -> None: ...

    def step_of(self) -> None: ...

    def _steps(self) -> None: ...


class _Both(_Protocol):
    step = stepp = None


@pytest.mark.parametrize("entry", [_Far, _Both])
def test_far_and_private_names_beside_an_inherited_one_are_allowed(entry: type):
    """`steer` and `step_of` are not like enough to the `step` of the base class; `_steps` is private."""
    check_names(entry, kind="credit", known=("step",), traits=_Traits)


def test_what_a_base_class_has_may_be_known_not_to_be_ours():
    """So a user's environment may override any class."""
    check_names(_Override, kind="environment", known=("step",), overrides=False)


def test_a_name_is_found_without_loading_other_entries():
    """The entry that lies where the class does is loaded first; a class that lies elsewhere is still found."""
    table = Table(
        "perturn.nowhere",
        {"broken": "perturn.nowhere:Nothing", "mine": f"{Table.__module__}:Table", "other": _Traits},
    )
    moved = Table("perturn.nowhere", {"moved": "perturn.credit:CreditTraits"})

    assert name_of(table, Table) == "mine"
    assert name_of(table, _Traits) == "other"
    assert name_of(moved, moved["moved"]) == "moved"
