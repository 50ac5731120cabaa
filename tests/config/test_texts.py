"""A text without quotes is the text that was typed, whatever YAML 1.1 reads in its place; numbers are YAML 1.2's."""

import copy
import json
import pickle

import pytest
import yaml

from perturn.config.parsing import parse, to_yaml
from perturn.config.recipe import Recipe, read_recipe
from perturn.errors import ConfigError
from perturn.io.read_input import parse_yaml
from perturn.study.settings import read_study
from small import refusal, small

TYPED = [
    *("on", "off", "yes", "no", "On", "YES", "y", "n"),
    *("007", "7", "1e3", "1e-6", "1_000", "0x1f", "0o17", "1.50", "2026-01-01"),
]


@pytest.fixture
def written(tmp_path):
    """Write a recipe with a line added, and return its file."""

    def write(line):
        file = tmp_path / "recipe.yaml"
        file.write_text(
            yaml.safe_dump({key: value for key, value in small().items() if key != "name"}) + line
        )
        return file

    return write


@pytest.mark.parametrize("text", TYPED)
def test_a_name_is_what_was_typed(written, text):
    """In the file, and as a word of the command line; and as the run folder records it."""
    typed = read_recipe(written(f"name: {text}\n"))

    assert typed.name == text
    assert read_recipe(written("name: other\n"), [f"name={text}"]).name == text
    assert parse(Recipe, yaml.safe_load(to_yaml(typed))) == typed


@pytest.mark.parametrize("text", [*TYPED, "12:30", "1:30:00", "2026-01-01T10:00:00Z"])
def test_texts_within_sections_are_what_was_typed(written, text):
    """Fields of sections, optional ones, and items of lists."""
    recipe = read_recipe(
        written(f"name: one\nworlds: {{pass_env: [{text}]}}\nreport_to: [{text}]\n"),
        [f"protocol.suffix={text}"],
    )

    assert recipe.protocol.suffix == text
    assert (recipe.worlds.pass_env, recipe.report_to) == ([text], [text])


@pytest.mark.parametrize(
    ("text", "says"), [("true", "true, which YAML reads as a boolean"), ("~", "null"), ("null", "no value")]
)
def test_what_is_no_text_is_rejected_with_the_remedy(written, text, says):
    """True and null mean the same in every version of YAML."""
    for words in ([], [f"name={text}"]):
        message = refusal(read_recipe, written(f"name: {'one' if words else text}\n"), words)

        assert message.startswith("name must be text, got")
        assert says in message
        assert message.endswith("write it in quotes.")


def test_numbers_and_booleans_are_read_where_they_are_expected(written):
    """1e-6 is a number without its point too; so are settings of a loss, and what has no type."""
    recipe = read_recipe(
        written("name: one\ndeterministic: on\nseed: 010\n"),
        [
            "sft.learning_rate=1e-6",
            "sft.batch_size=1_0",
            "align.loss.low=2e-1",
            "environment.made_up={a: 1e-6, b: on, c: [no], d: 12:30, e: 007}",
        ],
    )

    assert (recipe.deterministic, recipe.seed) == (True, 10)
    assert (recipe.sft.learning_rate, recipe.sft.batch_size) == (1e-6, 10)
    assert recipe.align.loss["low"] == 0.2
    assert recipe.environment["made_up"] == {"a": 1e-6, "b": True, "c": [False], "d": "12:30", "e": 7}
    assert {type(value) for value in (recipe.seed, recipe.align.loss["low"])} == {int, float}


def test_texts_in_quotes_come_back_from_a_run_folder(written):
    """Where no type says so: `1e3` in quotes was written without them, and read back as a number."""
    texts = {"made_up": ["1e3", "0o17", "on", "12:30", "7"]}
    recipe = read_recipe(written("name: one\n"), [f"environment={json.dumps({'name': 'e', **texts})}"])
    file = written("")
    file.write_text(to_yaml(recipe))

    assert read_recipe(file) == recipe
    assert recipe.environment["made_up"] == texts["made_up"]


def test_a_study_has_texts_too(written, tmp_path):
    """Its name, those of methods, and what it lays over a recipe; a number that a text would need is rejected."""
    written("name: one\n")
    study = tmp_path / "study.yaml"
    study.write_text(
        "name: 007\nrecipe: recipe.yaml\ntest: {tasks: {split: on}}\n"
        "methods: {yes: {align.loss.name: dpo, protocol.suffix: '1'}, 1e3: {align.learning_rate: 1e-5}}\n"
    )

    found, _ = read_study(study)

    assert (found.name, found.test.tasks.split) == ("007", "on")
    assert found.methods["1e3"] == {"align.learning_rate": "1e-5"}  # as always: names of runs have its digest
    assert set(found.methods) == {"base", "sft", "yes", "1e3"}
    assert read_study(study, ["name=on"])[0].name == "on"
    with pytest.raises(ConfigError, match=r"name must be text, got true.*in quotes"):
        read_study(study, ["name=true"])


def test_numbers_that_keep_their_texts_are_numbers():
    """They are copied, sent to processes and written as JSON as any number is."""
    data = parse_yaml("{a: 007, b: 1.50, c: on}", "here", ConfigError, keep_texts=True)

    for same in (data, copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert same == {"a": 7, "b": 1.5, "c": "on"}
        assert (same["a"].text, same["b"].text) == ("007", "1.50")
    assert json.dumps(data) == '{"a": 7, "b": 1.5, "c": "on"}'


def test_a_repeated_key_is_rejected_with_its_line(written):
    """YAML keeps the last value alone. Values of a merged mapping may be replaced."""
    message = refusal(read_recipe, written("name: one\nseed: 1\nseed: 2\n"))
    line = written("").read_text().count("\n") + 3
    merged = "name: one\nengine: &it {name: local, context: 9}\nbackend: {<<: *it, name: tinker}\n"

    assert f"is not YAML: key 'seed' is repeated in line {line}, column 1." in message
    assert read_recipe(written(merged)).backend == {"name": "tinker", "context": 9}
