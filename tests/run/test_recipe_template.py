"""`perturn init`: a recipe that is read back as it was meant, short or with a comment at every setting."""

import dataclasses
import json
import re
import typing

import pytest
import yaml

from perturn.config.parsing import build, parse
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.reward_settings import JudgeSettings, RewardModel
from perturn.config.sections import Base, Sft, User
from perturn.errors import ConfigError
from perturn.losses import LOSSES
from perturn.rows import ROWS
from perturn.run.execute import check
from perturn.run.recipe_template import copy_recipe, unfit_words, write_recipe
from perturn.table import name_of

GUESS = "own_environment:GuessNumber"


@pytest.fixture
def file(tmp_path, own_environment):
    """Where a recipe is written to."""
    return tmp_path / "first.yaml"


@pytest.mark.parametrize(
    ("loss", "rows", "samples"),
    [("ppo-clip", "groups", 8), ("kto", "kto", 1), ("dpo", "expert-pairs", 1)],
)
def test_a_loss_of_any_kind_of_rows_gets_rows_that_fit(file, tiny_folder, loss, rows, samples):
    """On an environment with an expert: the recipe checks out as it is."""
    write_recipe(file, environment=GUESS, model=str(tiny_folder), loss=loss)

    recipe = read_recipe(file, ["worlds.processes=0"])
    check(recipe)
    assert (recipe.align.loss["name"], name_of(ROWS, type(recipe.rows))) == (loss, rows)
    assert (recipe.explore.samples, recipe.sft is not None) == (samples, True)


def test_without_an_expert_all_tasks_are_explored(file, own_environment, monkeypatch, tiny_folder):
    """All 8, since no SFT needs half of them."""
    monkeypatch.delattr(own_environment.GuessNumber, "expert")
    write_recipe(file, environment=GUESS, model=str(tiny_folder))

    tasks = read_recipe(file).explore.tasks

    assert (tasks.skip, tasks.n or tasks.per_kind) == (0, 8)


@pytest.mark.parametrize(
    ("model", "environment", "warned"),
    [
        ("tiny-agent", "hotpotqa", True),
        ("tiny-agent", "alfworld-like", False),
        ("some/model", "hotpotqa", False),
    ],
)
def test_a_policy_of_the_package_is_not_for_every_environment(model, environment, warned):
    assert ("If hotpotqa uses other words" in unfit_words(model, environment)) == warned


def test_rows_that_need_an_expert_are_refused_where_there_is_none(file, own_environment, monkeypatch):
    """With the row makers that were looked at, and no file."""
    monkeypatch.delattr(own_environment.GuessNumber, "expert")

    with pytest.raises(
        ConfigError,
        match=r"an expert .* is missing, and rows that are labelled come from kto, which read its episodes",
    ):
        write_recipe(file, environment=GUESS, model="some/model", loss="kto")
    assert not file.exists()


def test_a_policy_of_the_package_keeps_the_protocol_it_was_trained_under(file):
    """In the environment that it was trained in; the rules of another environment are its own."""
    write_recipe(file, environment="alfworld-like", model="tiny-agent")

    recipe = read_recipe(file)
    check(recipe)
    assert (recipe.protocol.name, recipe.protocol.format) == ("alfworld-lab", None)
    assert (recipe.explore.sampling.max_new_tokens, recipe.evaluate.sampling.max_new_tokens) == (16, 16)
    assert (recipe.sft.learning_rate, recipe.align.learning_rate) == (3e-4, 1e-5)  # it is small


def test_other_models_get_the_protocol_of_the_environment(file):
    """The one that it declares."""
    write_recipe(file, environment="alfworld-like", model="some/model")

    assert read_recipe(file).protocol.name == "alfworld-eto"


def test_a_recipe_for_an_agent_program_leaves_room_for_its_answers(file, tmp_path):
    """An answer may hold thoughts and calls."""
    rows = [{"id": str(number), "split": ("train", "test")[number % 2]} for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = [f"environment.tasks={tmp_path / 'tasks.jsonl'}", "environment.command=[python, mine.py]"]

    write_recipe(file, environment="agent", model="some/model", overrides=program)

    recipe = read_recipe(file)
    assert (recipe.explore.sampling.max_new_tokens, recipe.evaluate.sampling.max_new_tokens) == (512, 512)
    assert (recipe.environment["command"], recipe.protocol.name) == (["python", "mine.py"], "agent")


def uncommented(text):
    """The recipe with every commented default made a setting."""
    return re.sub(r"^( *)#(\w)", r"\1\2", text, flags=re.MULTILINE)


def test_it_is_read_back_as_a_recipe_that_checks_out(file, tiny_folder):
    """Task lists fit the environment: 8 tasks to teach and explore, which do not overlap, and 4 to evaluate."""
    write_recipe(file, environment=GUESS, model=str(tiny_folder))

    recipe = read_recipe(file, ["worlds.processes=0"])
    check(recipe)
    assert recipe.name == "first"
    assert (recipe.sft.tasks.per_kind, recipe.explore.tasks.skip, recipe.explore.tasks.per_kind) == (4, 4, 4)
    assert (recipe.evaluate.tasks.split, recipe.evaluate.tasks.per_kind) == ("test", 4)


PAIRED = [name for name, each in LOSSES.items() if each().traits.needs_rejected]


@pytest.mark.parametrize(
    ("loss", "lora"),
    [
        pytest.param(loss, lora, marks=pytest.mark.slow if lora != bool(number % 2) else ())
        for number, loss in enumerate(PAIRED)
        for lora in (False, True)
    ],
)
def test_what_is_commented_out_is_the_default(file, loss, lora):
    """With every # taken away it is the same recipe, but for sections that were None; so the comments do not lie."""
    write_recipe(file, environment=GUESS, model="some/model", loss=loss, lora=lora, full=True)
    recipe = read_recipe(file)

    data = yaml.safe_load(uncommented(file.read_text()))
    rewards = data.pop("reward")
    reward = rewards["model"]  # which groups alone have
    assert rewards["judge"] is None  # its model has no default
    assert {**reward, "loss": {"name": "dpo"}} | {"lora": None, "tasks": None} == (
        dataclasses.asdict(RewardModel())
    )
    assert build(LOSSES, reward["loss"], "") == build(LOSSES, {"name": "dpo"}, "")
    every = parse(Recipe, data)

    assert build(LOSSES, every.align.loss, "") == build(LOSSES, recipe.align.loss, "")
    for part in ("sft", "align"):
        ours, theirs = getattr(recipe, part), getattr(every, part)
        assert (ours.lora is not None) is lora
        same = {"loss": theirs.loss, "lora": theirs.lora, "tasks": theirs.tasks}
        assert dataclasses.replace(ours, **same) == theirs
    rest = {
        name: getattr(every, name) for name in ("expert", "sft", "align", "engine", "environment", "evaluate")
    }
    assert dataclasses.replace(recipe, **rest) == every


def settings(kind):
    """Names of all settings of a class and of those inside it."""
    hints = typing.get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind)):
        yield name
        for part in (hints[name], *typing.get_args(hints[name])):
            if dataclasses.is_dataclass(part) and name != "cluster":  # an address, which has no default
                yield from settings(part)


def test_every_setting_is_there(file):
    """Active or commented out, but for sections that hold a setting without a default; these are named alone."""
    write_recipe(file, environment=GUESS, model="some/model", full=True)

    found = set(re.findall(r"^ *#?(\w+):", file.read_text(), re.MULTILINE))

    missing = set(settings(Recipe)) - found
    without_default = {*settings(Base), *settings(JudgeSettings), *settings(User)}
    assert {"base"} <= missing <= {"base", *without_default} - set(settings(Sft))


@pytest.mark.slow
def test_settings_given_as_words_replace_what_would_be_chosen(file):
    """Also those of the environment, which decide how many tasks there are."""
    words = ["seed=3", "align.loss.pivot=0.8", "environment.kinds=[find-plant, find-animal]"]

    write_recipe(file, environment="scienceworld", model="smollm2-135m", overrides=words)

    recipe = read_recipe(file)
    assert (recipe.seed, recipe.align.loss) == (3, {"name": "tlm-dre", "pivot": 0.8})
    assert recipe.environment == {"name": "scienceworld", "kinds": ["find-plant", "find-animal"]}
    assert recipe.protocol.name == "scienceworld-eto"
    assert recipe.sft.tasks.per_kind == recipe.evaluate.tasks.per_kind == 10


def test_an_existing_file_is_left_as_it_is(file):
    """Whatever it holds."""
    file.write_text("mine")

    with pytest.raises(ConfigError, match="exists and is left as it is"):
        write_recipe(file, environment=GUESS, model="some/model")

    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss": "sft"}, "unknown loss 'sft' for an alignment"),
        ({"loss": "tlm-der"}, "Did you mean 'tlm-dre'?"),
        ({"environment": "scienceworl"}, "Did you mean 'scienceworld'?"),
        ({"overrides": ["sed=1"]}, "unknown key 'sed'. Did you mean 'seed'?"),
        (
            {"overrides": ["rows={name: kto}"]},
            "are labelled, and loss 'tlm-dre' does not learn from labelled. Known: kto. Add align.loss.name",
        ),
    ],
)
def test_a_mistake_writes_nothing(file, change, says):
    """One line, and no file."""
    with pytest.raises(ConfigError) as caught:
        write_recipe(file, **{"environment": GUESS, "model": "some/model"} | change)

    assert says in str(caught.value)
    assert not file.exists()


def test_a_recipe_of_the_package_is_copied_as_it_is(tmp_path):
    """Comments and all; nothing is overwritten."""
    file = tmp_path / "mine.yaml"

    copy_recipe(file, "demo-scienceworld")

    assert file.read_text().startswith("# tlm-DRE on ScienceWorld with a 135M model.")
    assert read_recipe(file).name == "demo-scienceworld"
    with pytest.raises(ConfigError, match="exists and is left as it is"):
        copy_recipe(file, "demo")
    with pytest.raises(ConfigError, match="no recipe 'dem' comes with the package"):
        copy_recipe(tmp_path / "other.yaml", "dem")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("text", ["007", "1e3", "on"])
def test_a_text_stays_as_it_was_typed(file, text, full):
    write_recipe(file, environment="alfworld-like", model="tiny-agent", overrides=[f"name={text}"], full=full)

    assert read_recipe(file).name == text


def test_a_key_is_not_written_into_a_recipe(file):
    with pytest.raises(ConfigError, match="holds what looks like a key"):
        write_recipe(file, environment=GUESS, model="m", overrides=["engine.key=sk-planted9f8e7d6c5b4a3928"])
    assert not file.exists()
