"""Recipes: what is refused and how, and what survives a round trip."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from perturn.config.parsing import build, parse, to_yaml
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.stages import makes
from perturn.engines import ENGINES
from perturn.envs import ENVIRONMENTS
from perturn.errors import ConfigError, DataError, EnvironmentFailure
from perturn.losses import LOSSES
from perturn.run.protocol_rules import make_protocol
from perturn.types import Sampling
from small import refusal, small

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(small()), encoding="utf-8")
    return file


def test_an_unknown_setting_of_a_loss_is_refused_with_its_dotted_path_and_the_closest_one():
    """Dpo knows beta, reduction and sft; `bata` is one letter from beta."""
    section = {"name": "dpo", "bata": 0.2}

    message = refusal(build, LOSSES, section, "align.loss")

    assert message == (
        "unknown key 'align.loss.bata'. Did you mean 'align.loss.beta'? "
        "Known: align.loss.beta, align.loss.reduction, align.loss.sft."
    )


def test_an_unknown_entry_of_a_table_is_refused_with_the_closest_one():
    """`dp` is not a loss; dpo is the nearest name."""
    message = refusal(build, LOSSES, {"name": "dp"}, "align.loss")

    assert message.startswith("unknown align.loss.name 'dp'. Did you mean 'dpo'? Known: dil, dmpo, dpo,")


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"sede": 1}, "unknown key 'sede'. Did you mean 'seed'? Known: align, "),
        ({1: 2}, "unknown key '1'. Known: align, "),
        (
            {"explore": {"sampling": {"temprature": 1}}},
            "unknown key 'explore.sampling.temprature'. Did you mean 'exp",
        ),
        ({"explore": {"sampling": {True: 1}}}, "unknown key 'explore.sampling.True'. "),
        ({"model": {}}, "model.name is missing, and it has no default; set it."),
        ({"seed": "one"}, "seed must be a whole number, got 'one'."),
        ({"model": "smollm2"}, "model must be "),
        ({"sft": {"loss": "sft"}}, "sft.loss must be a mapping, got 'sft'."),
        ({"sft": {"loss": {}}}, "sft.loss.name is missing; name a loss"),
        ({"environment": {"kinds": []}}, "environment.name is missing; "),
        ({"name": "a/b"}, "name must be usable as a folder name, got 'a/b'."),
        ({"name": ".."}, "name must be usable as a folder name, got '..'."),
        ({"name": ""}, "name must be usable as a folder name, got ''."),
        (
            {"explore": {"sampling": {"temperature": -1}}},
            "explore.sampling.temperature must be >= 0, got -1.0.",
        ),
        ({"explore": {"tasks": {"per_kind": 0}}}, "explore.tasks.per_kind must be >= 1, got 0."),
        ({"evaluate": {"concurrency": 0}}, "evaluate.concurrency must be >= 1, got 0."),
        ({"protocol": {"name": "x", "max_turns": 0}}, "protocol.max_turns must be >= 1, got 0."),
        ({"model": {"name": "x", "max_length": 0}}, "model.max_length must be >= 1, got 0."),
        (
            {"rows": {"name": "expert-pairs", "threshold": float("nan")}},
            "rows.threshold must be a finite number, got nan.",
        ),
        (
            {"sft": {"loss": {"name": "sft"}, "epochs": float("inf")}},
            "sft.epochs must be a finite number, got inf.",
        ),
        (
            {"sft": {"loss": {"name": "sft"}, "warmup_ratio": 5}},
            "sft.warmup_ratio must be < 1, got 5.0.",
        ),
        ({"sft": {"loss": {"name": "sft"}, "lora": {"rank": 0}}}, "sft.lora.rank must be >= 1, got 0."),
        ({"sft": {"loss": {"name": "sft"}, "batch_size": 0}}, "sft.batch_size must be >= 1, got 0."),
        ({"sft": {"loss": {"name": "sft"}, "token_budget": 0}}, "sft.token_budget must be >= 1, got 0."),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line_that_says_where(changes, begins):
    """Each change breaks the small recipe in one place."""
    message = refusal(parse, Recipe, small() | changes)

    assert message.startswith(begins)


def test_a_missing_section_is_refused_by_name():
    """Whatever plays needs an environment, which may declare its rules; what plays nothing needs data of the user's."""
    without = {name: {key: value for key, value in small().items() if key != name} for name in small()}

    assert parse(Recipe, without["protocol"]).protocol is None
    assert refusal(parse, Recipe, without["environment"]).startswith(
        "environment is missing, which sft plays in"
    )
    assert refusal(parse, Recipe, without["align"] | {"iterations": 2}) == (
        "iterations need an alignment; set align."
    )


def test_a_setting_of_a_loss_that_is_out_of_range_is_refused_with_its_path():
    """Beta must be positive; the loss says so itself, build adds where."""
    message = refusal(build, LOSSES, {"name": "dpo", "beta": -0.1}, "align.loss")

    assert message.startswith("align.loss.beta must be > 0, got -0.1")


def test_overrides_reach_nested_settings_and_are_yaml(recipe_file):
    """Numbers, null, lists, and sections that the file does not have."""
    recipe = read_recipe(
        recipe_file,
        [
            "seed=3",
            "align.loss.beta=0.2",
            "explore.tasks.per_kind=null",
            "sft.tasks.split=dev",
            "environment.kinds=[a]",
        ],
    )

    assert recipe.seed == 3
    assert recipe.align.loss == {"name": "tlm-dre", "beta": 0.2}
    assert recipe.explore.tasks.per_kind is None
    assert recipe.sft.tasks.split == "dev"
    assert recipe.environment["kinds"] == ["a"]


def test_an_override_opens_a_section_that_the_resolved_recipe_left_empty(recipe_file):
    """`to_yaml` writes `lora: null`; sft.lora.rank=4 means the section."""
    recipe_file.write_text(to_yaml(read_recipe(recipe_file)), encoding="utf-8")

    recipe = read_recipe(recipe_file, ["sft.lora.rank=4"])

    assert recipe.sft.lora.rank == 4


def test_the_last_of_two_overrides_counts(recipe_file):
    """Words apply from left to right."""
    recipe = read_recipe(recipe_file, ["seed=3", "seed=4"])

    assert recipe.seed == 4


def test_a_section_given_in_part_keeps_the_fields_own_defaults():
    """Exploration samples at 1.0, a judge writes 1024 tokens and a user 256; the class Sampling says 0.0 and 64."""
    judge = {"model": "m", "rubric": "Rate it.", "sampling": {"temperature": 0.5}}
    user = {"model": "m", "sampling": {"temperature": 0.5}}

    made = parse(
        Recipe,
        small(explore={"sampling": {"max_new_tokens": 9}}, reward={"judge": judge}, user=user),
    )

    assert made.explore.sampling == Sampling(1.0, max_new_tokens=9)
    assert made.judge.sampling == Sampling(0.5, max_new_tokens=1024)
    assert made.user.sampling == Sampling(0.5, max_new_tokens=256)


@pytest.mark.parametrize(
    ("protocol", "tokens"), [("webshop-eto", 512), ("hotpotqa-react", 100), ("mt-bench", 1024)]
)
def test_a_changed_temperature_keeps_the_protocols_limit(recipe_file, protocol, tokens):
    """Without the section `evaluate.sampling`, the recipe stays without it."""
    words = [f"protocol.name={protocol}"]

    changed = read_recipe(recipe_file, [*words, "evaluate.sampling.temperature=0.7"])

    assert changed.evaluate.sampling == Sampling(0.7, max_new_tokens=tokens)
    assert read_recipe(recipe_file, words).evaluate.sampling is None


@pytest.mark.parametrize(
    ("word", "begins"),
    [
        ("seed", "an override must look like key=value, such as seed=1 or align.loss.beta=0.2, got 'seed'."),
        ("=3", "an override must look like key=value"),
        ("seed.x=3", "override 'seed.x=3': "),
        ("name.x=3", "override 'name.x=3': name must be a section, got 'small'."),
        ("seed=[", "override 'seed=[': the value is not YAML: "),
        ("align.los.beta=1", "unknown key 'align.los'. Did you mean 'align.loss'?"),
        ("seed=", "seed must be a whole number, got None."),
    ],
)
def test_a_malformed_override_is_refused(recipe_file, word, begins):
    """One line that names the word or the key."""
    recipe_file.write_text(yaml.safe_dump(small(seed=1)), encoding="utf-8")

    message = refusal(read_recipe, recipe_file, [word])

    assert message.startswith(begins)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name: [", r"recipe .*recipe.yaml' is not YAML: while parsing"),
        (b"\xff\xfe\x00", r".*recipe.yaml cannot be read: "),
        (b"- a\n- b\n", r"recipe .*recipe.yaml' must be a mapping of settings, got \['a', 'b'\]\."),
        (b"", r"recipe .*recipe.yaml' must be a mapping of settings, got None\."),
        (
            b"a: !!python/object/apply:os.system ['true']",
            r"recipe .*recipe.yaml' is not YAML: could not determine",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(recipe_file, content, says):
    """Broken YAML, binary, other YAML, an empty file, and YAML that would run code."""
    recipe_file.write_bytes(content)

    message = refusal(read_recipe, recipe_file)

    assert re.match(says, message)


def test_a_missing_recipe_is_refused_by_name(tmp_path):
    """The message names those that come with the package."""
    message = refusal(read_recipe, tmp_path / "none.yaml")

    assert message.startswith(
        f"{str(tmp_path / 'none.yaml')!r} is no recipe file, run folder or bundled recipe. "
    )
    assert "scienceworld_tlm-dre_demo" in message
    assert ", demo-scienceworld, " in message


def test_a_misspelt_demo_is_suggested():
    """`demo` is the name of a run, and its file has another."""
    assert "Did you mean 'demo'?" in refusal(read_recipe, Path("dmo"))


@pytest.mark.parametrize("name", ["demo-scienceworld", "scienceworld_tlm-dre_demo"])
def test_a_recipe_of_the_package_is_read_by_its_name(tmp_path, monkeypatch, name):
    """By that of its run, or of its file, wherever one is; a file of that name comes first."""
    monkeypatch.chdir(tmp_path)

    assert read_recipe(Path(name)) == read_recipe(RECIPES[0].with_name("scienceworld_tlm-dre_demo.yaml"))
    Path(name).write_text("name: own\nmodel: {name: m}\nsft: {loss: {name: sft}}\nexpert: {file: f}\n")
    assert read_recipe(Path(name)).name == "own"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)  # a busy machine is no failure
@given(
    seed=st.integers(0, 2**31),
    name=st.from_regex(r"[\w-]{0,5}\w", fullmatch=True),
    system=st.none() | st.text(max_size=20),
    temperature=st.floats(0, 3),
    learning_rate=st.floats(1e-9, 1),
    per_kind=st.none() | st.integers(1, 99),
    beta=st.floats(0.01, 2),
    targets=st.just("all-linear") | st.lists(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), min_size=1),
)
def test_a_resolved_recipe_reads_back_equal(
    tmp_path_factory, seed, name, system, temperature, learning_rate, per_kind, beta, targets
):
    """`to_yaml` then `read_recipe` is the identity, floats to the last bit."""
    recipe = parse(
        Recipe,
        small(
            name=name,
            seed=seed,
            protocol={"name": "mine", "system": system, "max_turns": 3},
            explore={"sampling": {"temperature": temperature}, "tasks": {"per_kind": per_kind}},
            align={
                "loss": {"name": "dpo", "beta": beta},
                "learning_rate": learning_rate,
                "lora": {"target_modules": targets},
            },
        ),
    )
    file = tmp_path_factory.getbasetemp() / "round-trip.yaml"

    file.write_text(to_yaml(recipe), encoding="utf-8")

    assert read_recipe(file) == recipe


def test_a_number_in_yaml_without_a_point_is_a_number(recipe_file):
    """YAML 1.1 reads 1e-4 as text; the field is a float, so it is taken as one."""
    recipe = read_recipe(recipe_file, ["sft.learning_rate=1e-4"])

    assert recipe.sft.learning_rate == 1e-4


def test_settings_of_a_class_of_the_users_own_are_taken_by_name():
    """Neither annotations nor a dataclass are needed, and **rest asks for nothing."""

    class World:
        def __init__(self, size, color="red", **rest):
            self.size, self.color = size, color

    world = build({"w": World}, {"name": "w", "size": 3}, "environment")

    assert (world.size, world.color) == (3, "red")


def test_a_nested_dataclass_is_parsed_inside_an_optional_field():
    """`Inner | None` takes a mapping, and null."""

    @dataclass(frozen=True)
    class Inner:
        x: int = 1

    @dataclass(frozen=True)
    class Outer:
        inner: Inner | None = None

    parsed = [parse(Outer, {"inner": value}) for value in ({"x": 2}, None)]

    assert parsed == [Outer(Inner(2)), Outer(None)]


def environment_name(section):
    """Name of the environment that a section makes; of one whose data users bring, no more than that is missed.

    Nor is more than the interpreter missed, of one that plays in an interpreter that users set up.
    """
    try:
        return build(ENVIRONMENTS, section, "environment").name
    except (ConfigError, DataError, EnvironmentFailure) as missing:
        if not re.fullmatch(
            r"tau3 needs the files of \w+, which is not there\. .*|"
            r"data/\S+: expected a file, got none\. Correct the path\.|"
            r"program 'venvs/\w+/bin/python' is missing, and environment\.python names it.*",
            str(missing),
        ):
            raise
        return section["name"]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_shipped_recipe_parses_and_its_sections_can_be_built(file, tmp_path, monkeypatch):
    """Losses, engine, environment and protocol are made; before tasks are asked for, no JVM starts, no game is read.

    ALFWorld sees whether there is any data.
    """
    (tmp_path / "train.jsonl.xz").touch()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    recipe = read_recipe(file)

    stages = [stage for stage in (recipe.sft, recipe.align) if stage is not None]
    losses = [build(LOSSES, stage.loss, "loss") for stage in stages]
    engine = build(ENGINES, recipe.engine, "engine")
    environment = environment_name(recipe.environment)
    named = recipe.protocol is not None and recipe.protocol.name is not None
    protocol = make_protocol(recipe.protocol) if named else None  # else the environment's class has the rules

    needed = {"sft": False, "align": not makes(recipe, "groups")}
    trained = [name for name in needed if getattr(recipe, name) is not None]
    assert [loss.traits.needs_rejected for loss in losses] == [needed[name] for name in trained]
    assert bool(trained) == engine.traits.serves_checkpoints
    assert environment.startswith(recipe.environment["name"])
    if protocol is not None:
        departs = recipe.protocol.example is not None or recipe.protocol.max_turns is not None
        assert protocol.name == recipe.protocol.name + ("-custom" if departs else "")
    assert replace(recipe, seed=1) != recipe


def test_recipes_are_shipped():
    """Otherwise the test above would pass over nothing."""
    assert RECIPES


@pytest.mark.parametrize("tasks", [{}, {"n": 2}, {"per_kind": 1, "skip": 3}])
def test_a_task_list_to_be_scored_is_of_the_test_split_whatever_else_is_said_of_it(tasks):
    """As where nothing is said; task lists to teach and to explore are of the train split."""
    recipe = parse(Recipe, small(evaluate={"tasks": tasks}, explore={"tasks": tasks}))

    assert (recipe.evaluate.tasks.split, recipe.explore.tasks.split) == ("test", "train")
    assert parse(Recipe, small()).evaluate.tasks.split == "test"
    assert parse(Recipe, small(evaluate={"tasks": {"split": "dev"}})).evaluate.tasks.split == "dev"
