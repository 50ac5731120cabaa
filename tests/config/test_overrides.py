"""Overrides: what another name of an entry does to its settings, and values that are rejected."""

import pytest
import yaml

from perturn.config.recipe import read_recipe
from small import refusal, small

DMPO = {"align": {"loss": {"name": "dmpo", "gamma": 0.5}}}


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a recipe with changes and overrides."""

    def with_words(*words, **changes):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(small(**changes)))
        return read_recipe(file, words)

    return with_words


@pytest.mark.parametrize("words", [("align.loss.name=dpo",), ("align.loss.beta=0.3", "align.loss.name=dpo")])
def test_another_loss_drops_the_settings_of_the_file_that_it_lacks(read, words):
    """The loss dpo has no gamma; a setting of the same command is kept."""
    settings = {"beta": 0.3} if len(words) == 2 else {}

    assert read(*words, **DMPO).align.loss == {"name": "dpo", **settings}


@pytest.mark.parametrize(
    "words", [["rows.threshold=0.2", "rows.name=groups"], ["rows.name=groups", "rows.threshold=0.2"]]
)
def test_a_setting_of_the_command_that_the_new_entry_lacks_is_unknown(read, words):
    """In either order; the setting of the file is dropped."""
    loss = {"align": {"loss": {"name": "ppo-clip"}}}

    says = "unknown key 'rows.threshold'. threshold is a setting of rows.name="
    assert refusal(lambda: read(*words, rows={"name": "expert-pairs"}, **loss)).startswith(says)


def test_a_setting_of_the_default_engine_needs_no_name(read):
    """`perturn init` writes no section `engine`, and the pages set its memory by an override."""
    assert read("engine.cache_gigabytes=20").engine == {"name": "local", "cache_gigabytes": 20}
    assert read("engine.name=vllm", engine={"speculate": False}).engine == {"name": "vllm"}


def test_a_section_without_the_rate_of_the_one_it_replaces_is_rejected(read):
    """Else the policy would train with the default rate, which is far smaller. A section with a rate is taken."""
    align = {"loss": {"name": "dpo"}, "learning_rate": 0.01}

    assert refusal(lambda: read("align={loss: {name: dmpo}}", align=align)) == (
        "override 'align={loss: {name: dmpo}}' replaces the whole section, and would drop its learning_rate, 0.01. Set "
        "learning_rate too, or only the keys that change, such as align.loss."
    )
    assert read("align={loss: {name: dmpo}, learning_rate: 0.02}", align=align).align.learning_rate == 0.02
    assert read("align.loss={name: dmpo}", align=align).align.learning_rate == 0.01
    assert (
        read("align={loss: {name: dmpo}}", "align.learning_rate=0.03", align=align).align.learning_rate
        == 0.03
    )


def test_only_a_rate_after_the_new_section_replaces_the_rate_of_the_old_one(read):
    """Changes apply in the order of the words, so the section would drop an earlier rate."""
    rate, section = "align.learning_rate=1.0e-5", "align={loss: {name: dmpo}}"

    assert "would drop its learning_rate, 1e-05." in refusal(read, rate, section)
    assert read(section, rate).align.learning_rate == 1e-5


@pytest.mark.parametrize("text", ["Say a # b", "#1", "[a, b] # two"])
def test_a_value_with_a_comment_is_rejected(read, text):
    """YAML would cut it off; in quotes it is kept."""
    message = refusal(read, f"protocol.system={text}")

    assert "the value must have no comment, which ` #` begins" in message
    assert message.endswith("""Write it in quotes, as in 'protocol.system="a # b"'.""")
    assert read(f"protocol.system='{text}'").protocol.system == text


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("protocol.history=all", "protocol.history must be a whole number or 'full', got 'all'."),
        (
            "sft=off",
            "sft must be a section of settings, such as sft.loss=..., or null to leave it out, got False.",
        ),
        ("model=off", "model must be a section of settings, such as model.name=..., got False."),
    ],
)
def test_every_choice_is_named(read, word, says):
    assert refusal(read, word) == says


def test_another_entry_within_then_drops_the_settings_of_the_file_that_it_lacks(read):
    """As in the first recipe; `then` may have a `then` too."""
    then = {"rows": {"name": "group-pairs", "per_group": 2}, **DMPO}
    words = ("then.rows.name=expert-pairs", "then.then.align.loss.name=dpo")

    found = read(*words, then={**then, "then": DMPO}).then

    assert found["rows"] == {"name": "expert-pairs"}
    assert (found["align"], found["then"]["align"]["loss"]) == (DMPO["align"], {"name": "dpo"})
