"""Keys and names that do not exist: what was meant is said with its full dotted key."""

import pytest

from perturn.config.key_suggestions import keys_of
from perturn.config.overrides import apply_overrides
from perturn.config.parsing import build, parse
from perturn.config.recipe import Recipe
from perturn.errors import ConfigError, closest
from perturn.losses import LOSSES
from small import small


def said(word):
    """The error about one override."""
    data = small()
    apply_overrides(data, [word])
    with pytest.raises(ConfigError) as caught:
        build(LOSSES, parse(Recipe, data).align.loss, "align.loss")
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("align.loss.nam=dpo", "unknown key 'align.loss.nam'. Did you mean 'align.loss.name'?"),
        ("align.loss.kernl=ukl", "Did you mean 'align.loss.kernel'?"),
        ("align.los.name=dpo", "Did you mean 'align.loss'? In full: align.loss.name."),
        ("aling.loss.name=dpo", "Did you mean 'align'? In full: align.loss.name."),
        ("aling.los.nam=dpo", "Did you mean 'align'? In full: align.loss.name."),
        ("evaluate.taks.splt=test", "Did you mean 'evaluate.tasks'? In full: evaluate.tasks.split."),
        ("evaluate.tasks.spilt=test", "Did you mean 'evaluate.tasks.split'?"),
        ("evaluate.Tasks.split=test", "Did you mean 'evaluate.tasks'?"),
        ("model.max-length=9", "Did you mean 'model.max_length'?"),
        ("environment={nam: scienceworld}", "Did you mean 'environment.name'?"),
        ("engine={nme: api}", "unknown key 'engine.nme'. Did you mean 'engine.name'?"),
    ],
)
def test_a_misspelt_key_is_told_in_full(word, says):
    """At any depth, in any of its parts, and within what picks from a table."""
    assert says in said(word)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("loss.name=dpo", "Did you mean 'align.loss.name' or 'sft.loss.name'?"),
        ("learning_rate=1e-5", "Did you mean 'align.learning_rate' or 'sft.learning_rate'?"),
        ("max_turns=5", "unknown key 'max_turns'. Did you mean 'protocol.max_turns'?"),
        ("explore.n=5", "unknown key 'explore.n'. Did you mean 'explore.tasks.n'?"),
    ],
)
def test_a_key_of_another_section_is_sent_there(word, says):
    """The section of the key is looked through first, then the usual ones."""
    assert says in said(word)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "groups.failed=zero",
            "unknown key 'groups'. Did you mean 'rows.name=groups'? Known: align, backend, ",
        ),
        ("branch.every=2", "unknown key 'branch'. Did you mean 'explore.name=branches'? Known: "),
        (
            "explore.window=3",
            "unknown key 'explore.window'. Did you mean 'explore.name=window'? Known: explore.c",
        ),
        ("rows.windows=3", "unknown key 'rows.windows'. Known: rows."),
    ],
)
def test_a_key_named_like_an_entry_is_told_the_key_that_picks_it(word, says):
    """Within the section of the key, if it has one; the known keys follow."""
    assert said(word).startswith(says)


@pytest.mark.parametrize(
    "key", ["environment", "engine", "credit", "explore", "rows", "align.loss", "evaluate.select"]
)
def test_a_name_that_is_null_is_refused(key):
    """With the names there are, in every section that picks an entry."""
    assert said(f"{key}={{name: null}}").startswith(f"{key}.name must be a name, got null. Known: ")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("align.loss=dpo", "align.loss must be a mapping, got 'dpo'. Write align.loss.name=dpo."),
        ("align=dpo", "align must be a section of settings, such as align.loss=..., got 'dpo'."),
        ("model=none", "model must be a section of settings, such as model.name=..., got 'none'."),
    ],
)
def test_a_name_in_place_of_a_section_is_told_its_key(word, says):
    """No class of ours is named."""
    assert said(word) == says


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TLM_DRE", "unknown align.loss.name 'TLM_DRE'. Did you mean 'tlm-dre'? Known: "),
        ("grpo", "unknown align.loss.name 'grpo'. 'grpo' is one of `perturn list credits`. "),
        ("nothing-like-it", "unknown align.loss.name 'nothing-like-it'. Known: "),
    ],
)
def test_a_name_is_looked_for_in_other_tables(name, says):
    """Case and joints do not matter."""
    assert said(f"align.loss.name={name}").startswith(says)


def test_closest_compares_what_differs():
    """Deep keys are not alike for the section that they share."""
    known = ["align.loss.alpha", "align.loss.name"]

    assert closest("align.loss.nam", known) == "align.loss.name"
    assert closest("align.loss.zzz", known) is None
    assert closest("align.loss.nam", []) is None


def test_the_keys_of_a_recipe_are_all_there():
    """Sections, their keys, names of entries; nothing twice."""
    keys = list(keys_of(Recipe))

    assert len(keys) == len(set(keys))
    assert {
        "seed",
        "align.loss",
        "align.loss.name",
        "credit.name",
        "evaluate.select.name",
        "evaluate.select.samples",
    } <= set(keys)
