"""Sections that are parsed into an entry of a table, such as `explore`."""

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated

import pytest
import yaml

from perturn.bounds import Bound, EntryOf, OneOf, bounded
from perturn.config.compatibility import IMPOSED, misfit
from perturn.config.key_suggestions import keys_of
from perturn.config.outside_files import named_inputs
from perturn.config.overrides import apply_overrides
from perturn.config.parsing import build, parse, to_mapping, to_yaml
from perturn.config.recipe import Recipe
from perturn.config.sections import COUNT
from perturn.errors import ConfigError
from perturn.explore import EXPLORERS, Explorer
from perturn.table import at_defaults, name_of
from small import refusal, small
from support.guests import added


@dataclass(frozen=True)
@bounded
class Patient(Explorer):
    """An explorer of another package."""

    patience: Annotated[int, COUNT] = 3


@dataclass(frozen=True)
@bounded
class Demanding(Explorer):
    """An explorer of another package, with a setting that has no default."""

    wish: Annotated[int, COUNT] = field(kw_only=True)


@dataclass(frozen=True)
class Unchecked:
    """An entry of another package that declares an interval and a choice, and compares nothing with them."""

    gap: Annotated[float, Bound(least=0, most=1)] = 0.5
    by: Annotated[str, OneOf(("score", "turns"))] = "score"


class Plain:
    """One that is no dataclass."""

    def __init__(self, gap: Annotated[float, Bound(least=0, most=1)] = 0.5) -> None:
        """Take it."""


@pytest.fixture
def guest():
    """A package that adds the explorers `patient` and `demanding`."""
    with added("perturn.explorers", patient=Patient, demanding=Demanding):
        yield Patient


def made(*words, **changes):
    data = small() | changes
    apply_overrides(data, words)
    return parse(Recipe, data)


def test_a_section_becomes_the_entry_that_it_names():
    """Settings are attributes, in overrides too."""
    recipe = made("explore.name=rollouts", "explore.samples=4", "explore.tasks.per_kind=2")

    assert type(recipe.explore) is EXPLORERS["rollouts"]
    assert recipe.explore.samples == 4
    assert recipe.explore.tasks.per_kind == 2


def test_a_section_without_a_name_is_the_default_entry():
    """And so is a section that other sections need."""
    assert type(made(explore={"samples": 2}).explore) is EXPLORERS["rollouts"]
    assert type(made().explore) is EXPLORERS["rollouts"]


def test_a_resolved_recipe_has_the_name_first(guest):
    """What was written reads back as the same recipe."""
    recipe = made("explore.name=patient", "explore.patience=5")

    written = yaml.safe_load(to_yaml(recipe))

    assert next(iter(written["explore"].items())) == ("name", "patient")
    assert written == to_mapping(recipe)
    assert parse(Recipe, written) == recipe


def test_an_entry_of_another_package_has_its_own_settings(guest):
    """Its bounds are checked, and its keys are known."""
    assert made("explore.name=patient").explore.patience == 3
    assert refusal(made, "explore.name=patient", "explore.patience=0") == (
        "explore.patience must be >= 1, got 0."
    )
    assert "Did you mean 'explore.patience'?" in refusal(made, "explore.name=patient", "explore.patienc=1")
    assert {"explore.name", "explore.patience"} <= set(keys_of(Recipe))
    assert list(named_inputs(made("explore.name=patient"))) == list(named_inputs(made()))


def test_a_setting_of_another_entry_names_the_entries_that_have_it(guest):
    """A near miss of an own setting is told as before."""
    assert refusal(made, "explore.patience=1").startswith(
        "unknown key 'explore.patience'. patience is a setting of explore.name=patient. Known: explore."
    )
    assert "Did you mean 'explore.samples'?" in refusal(made, "explore.sample=1")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("explore.name=rolouts", "unknown explore.name 'rolouts'. Did you mean 'rollouts'? Known: "),
        ("explore.nam=rollouts", "unknown key 'explore.nam'. Did you mean 'explore.name'?"),
        (
            "explore=rollouts",
            "explore must be a mapping, got 'rollouts'. Write explore.name=rollouts.",
        ),
        ("explore.name=dpo", "unknown explore.name 'dpo'. 'dpo' is one of `perturn list losses`. "),
        ("explore.name=[1]", "explore.name must be text, got [1]."),
        ("explore.n=5", "unknown key 'explore.n'. Did you mean 'explore.tasks.n'?"),
    ],
)
def test_what_picks_no_entry_is_refused(word, says):
    """With the name or the key that was meant."""
    assert refusal(made, word).startswith(says)


def test_a_class_that_no_table_has_has_no_name():
    """So a recipe that holds it cannot be written."""
    assert refusal(name_of, EXPLORERS, Patient).startswith(
        f"{__name__}.Patient is not in its table, which has rollouts"
    )


def test_a_mark_without_a_default_leaves_the_section_a_mapping():
    """Sections such as `credit` are built where they are used."""
    assert EntryOf("credits").default is None
    assert made("credit.name=uniform").credit == {"name": "uniform"}


def test_another_name_drops_the_settings_that_the_new_entry_lacks():
    """Those that both have stay, and a key that neither has is told; in whatever order they are given."""
    branches = {"name": "branches", "samples": 4, "every": 2, "branches": 3, "policy": "sft"}

    recipe = made("rows={name: groups}", "align.loss.name=ppo-clip", "explore.name=mcts", explore=branches)

    assert to_mapping(recipe.explore) == to_mapping(EXPLORERS["mcts"](samples=4, policy="sft"))
    assert "unknown key 'explore.evry'" in refusal(made, "explore.evry=1", "explore.name=mcts")
    kept = made("rows={name: groups}", "align.loss.name=ppo-clip", "explore.width=4", "explore.name=mcts")
    assert kept.explore.width == 4


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_explorer_reads_back_and_says_what_it_provides(name):
    """Its defaults are settings of a recipe; its traits are texts."""
    one = EXPLORERS[name](path="played.jsonl") if name == "file" else EXPLORERS[name]()

    assert parse(EXPLORERS[name], to_mapping(one)) == one
    assert all(isinstance(each, str) for each in one.traits.provides | one.traits.imposes)
    assert (one.rounds > 0) == bool(one.traits.provides)
    assert one.forecast(8, 10.0, 5.0).played >= one.rounds
    assert set(one.traits.imposes) <= set(IMPOSED)


@pytest.mark.parametrize(
    ("explorer", "needs", "takes", "says"),
    [
        (
            {},
            ["tree"],
            (),
            "rows needs a tree, and explore.name=rollouts provides none; explorers that do: mcts.",
        ),
        ({"name": "branches"}, [{"tree", "branches"}], (), None),
        (
            {"name": "branches", "turns": 1},
            ["branches"],
            (),
            "rows does not take branches that are not over, which explore.name=branches has; set explore.turns=null.",
        ),
        ({"name": "branches", "turns": 1}, ["branches"], {"cut-branches"}, None),
        (
            {"name": "patient"},
            ["patience"],
            (),
            "rows needs patience, and explore.name=patient provides none.",
        ),
        (
            {"name": "demanding", "wish": 1},
            ["tree"],
            (),
            "rows needs a tree, and explore.name=demanding provides none; explorers that do: mcts.",
        ),
    ],
)
def test_the_rule_asks_the_table_for_alternatives(guest, explorer, needs, takes, says):
    """What is needed must be provided, and what is imposed taken; guests are among the entries."""
    recipe = SimpleNamespace(explore=build(EXPLORERS, {"name": "rollouts"} | explorer, "explore"))

    assert misfit(recipe, "rows", needs, takes) == says


class Misspelt(Patient):
    """An explorer whose needs are never read."""

    need = ("entropy",)


class Unchosen(Patient):
    """An explorer whose choice is never asked for."""

    def chose(self, inputs):
        """Choose nothing."""


class Outside(Patient):
    """An explorer whose trait is never read."""

    resumes_earlier = True


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (Misspelt, "explorer Misspelt has 'need', which is never read. Did you mean `needs`?"),
        (Unchosen, "explorer Unchosen has 'chose', which is never read. Did you mean `choose`?"),
        (
            Outside,
            "explorer Outside has 'resumes_earlier', which is never read. Did you mean `ExplorerTraits(",
        ),
    ],
)
def test_an_explorer_with_a_misspelt_name_is_rejected(entry, says):
    with added("perturn.explorers", wrong=entry):
        assert refusal(made, "explore.name=wrong").startswith(says)


@dataclass(frozen=True)
class Failing(Patient):
    """An entry whose class raises."""

    def __post_init__(self):
        raise KeyError("no luck")


@pytest.mark.parametrize("where", ["explore", "rows", "align.loss", "credit", "engine"])
def test_an_entry_whose_class_raises_is_told_in_a_line(where):
    """By the type and the text of what it raised; made from a section, or with its defaults."""
    line = r"\(at .*test_entries\.py:\d+\)"
    says = rf"{__name__}\.Failing cannot be made: KeyError: 'no luck' {line}\. Correct its class\."

    assert re.fullmatch(f"{where}: {says}", refusal(build, {"failing": Failing}, {"name": "failing"}, where))
    assert re.fullmatch(says, refusal(at_defaults, Failing))


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (Unchecked, {"gap": 1.5}, r"rows\.gap must be <= 1, got 1\.5"),
        (Unchecked, {"by": "name"}, r"rows\.by must be one of"),
        (Plain, {"gap": -1}, r"rows\.gap must be >= 0, got -1"),
    ],
)
def test_a_recipe_keeps_intervals_that_a_class_does_not_compare(kind, settings, says):
    """A newcomer declares the interval and leaves `bounded` out."""
    with pytest.raises(ConfigError, match=says):
        build({"own": kind}, {"name": "own", **settings}, "rows")
    assert type(build({"own": kind}, {"name": "own", "gap": 1}, "rows")) is kind
