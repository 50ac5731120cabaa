"""`then`: a second recipe that starts from the last policy of the first."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.run_folder import Run, refuse_other, resolve_recipe, run_folder
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, RunError
from perturn.run.execute import refuse_early
from perturn.run.follow_up import following, in_order, planned
from perturn.study.settings import study_of
from small import refusal, small

PAIRS = {
    "rows": {"name": "expert-pairs", "threshold": 0.1},
    "align": {"loss": {"name": "dpo"}, "learning_rate": 1e-3},
}


def one(**changes):
    return parse(Recipe, small(seed=7, output="out", **changes))


def test_the_second_recipe_starts_from_the_last_policy_of_the_first():
    """Model, folder and seed follow from the first; what trains is its own alone."""
    found = following(one(then=PAIRS, iterations=3))

    assert found.model.name == "out/small/checkpoints/tlm-dre-003"
    assert (found.name, found.output, found.seed, found.iterations) == ("small-then", "out", 7, 1)
    assert found.environment == {"name": "scienceworld"}
    assert found.sft is None
    assert found.align.loss == {"name": "dpo"}
    assert found.then is None


def test_what_then_states_is_taken_instead_of_what_the_first_has():
    """Its own seed and number of tasks; the protocol stays."""
    found = following(one(then=PAIRS | {"seed": 1, "evaluate": {"tasks": {"n": 5}}}))

    assert (found.seed, found.evaluate.tasks.n, found.protocol.name) == (1, 5, "scienceworld-eto")


def test_a_recipe_without_then_is_followed_by_nothing():
    recipe = one()

    assert following(recipe) is None
    assert list(in_order(recipe)) == planned(recipe) == [recipe]


def test_a_chain_is_as_long_as_it_is_written():
    """`then` within `then`, each named after the one before."""
    found = in_order(one(then=PAIRS | {"then": PAIRS}))

    assert [each.name for each in found] == ["small", "small-then", "small-then-then"]


def test_a_plan_begins_each_recipe_with_the_model_that_is_there():
    """The policy that the first will train is not there before it was run."""
    assert [each.model.name for each in planned(one(then=PAIRS))] == ["smollm2-135m"] * 2


def test_a_plan_begins_with_the_policy_that_was_trained_once_it_is_there(tmp_path):
    """A finished run can be planned again: its second recipe was begun with that policy."""
    recipe = parse(Recipe, small(output=str(tmp_path), then=PAIRS))
    follows = following(recipe)
    RunPaths(run_folder(recipe)).checkpoint("tlm-dre").mkdir(parents=True)

    assert planned(recipe) == [recipe, follows]


def test_both_runs_can_be_moved_together(tmp_path, monkeypatch):
    """The second starts from a policy that lies beside it, wherever that is, and by whatever path it is named."""
    monkeypatch.chdir(tmp_path)
    recipe = one(then=PAIRS)
    for each in in_order(recipe):
        Run(each).close()
    Path("out").rename("moved")

    for folder in ("moved/small", tmp_path / "moved/small"):
        both = list(in_order(resolve_recipe(Path(folder))))
        for each in both:
            refuse_other(each)  # raises if it is another's
        assert [RunPaths(run_folder(each)).is_run for each in both] == [True, True]


def test_changed_settings_of_a_second_run_that_was_begun_are_refused_before_the_first_is_opened(
    tmp_path, monkeypatch
):
    """The first may take hours, and its own settings are as they were."""
    monkeypatch.chdir(tmp_path)
    for each in in_order(one(then=PAIRS)):
        Run(each).close()

    changed = one(then=PAIRS | {"align": {"loss": {"name": "dpo"}, "learning_rate": 1.0}})

    with pytest.raises(RunError, match=r"out/small-then was made by another recipe: align.learning_rate is"):
        refuse_early(changed, None)


@pytest.mark.parametrize(
    ("then", "begins"),
    [
        ({"name": "x"}, "then.name belongs to the recipe that comes before; leave it out of then."),
        ({"model": {"name": "x"}}, "then.model belongs to the recipe that comes before;"),
        ({"aling": {}}, "unknown key 'then.aling'. Did you mean 'then.align'?"),
        ({"align": {"loss": {"name": "dpo"}, "epoch": 1}}, "unknown key 'then.align.epoch'. Did you mean"),
    ],
)
def test_a_mistake_in_then_is_refused_by_its_dotted_name(then, begins):
    assert refusal(following, one(then=then)).startswith(begins)


def test_a_mistake_that_a_check_finds_is_placed_in_then(recipe):
    """The key of the loss alone would be sought in the first recipe."""
    then = {**PAIRS, "align": {"loss": {"nam": 1, "name": "dpo"}}, "explore": {"tasks": {"per_kind": 1}}}
    with recipe.open("a") as file:
        file.write(f"then: {json.dumps(then)}\n")

    done = CliRunner().invoke(app, ["run", str(recipe), "--dry-run"])

    assert str(done.exception).startswith(
        "then: unknown key 'align.loss.nam'. Did you mean 'align.loss.name'?"
    )


def test_then_needs_a_policy_that_was_trained():
    recipe = parse(Recipe, {**small(then=PAIRS), "sft": None, "align": None})

    assert "then begins with a trained policy, and this recipe trains none; set sft or align." in refusal(
        following, recipe
    )


def study_words(**more):
    return {
        "name": "s",
        "recipe": "r.yaml",
        "seeds": [0],
        "methods": {"sft": {}},
        "test": {"tasks": {"n": 2}},
        **more,
    }


def test_a_study_refuses_a_recipe_with_then(tmp_path):
    """Its cells are runs of one recipe; the second would be left out without a word."""
    (tmp_path / "r.yaml").write_text(json.dumps(small(then=PAIRS)))
    mixed = study_words(environments={"one": {"then": None}, "other": {}})

    with pytest.raises(ConfigError, match="`then` belongs to a study of its own; take it out with"):
        study_of(study_words(), tmp_path)
    with pytest.raises(ConfigError, match="`then` belongs to a study of its own; take it out with"):
        study_of(mixed, tmp_path)


def test_a_study_may_take_then_out(tmp_path):
    """As an environment lays it over the recipe."""
    (tmp_path / "r.yaml").write_text(json.dumps(small(then=PAIRS)))

    study, _ = study_of(study_words(environments={"one": {"then": None}}), tmp_path)

    assert study.environments == {"one": {"then": None}}


@pytest.mark.slow
def test_run_does_both_and_a_second_call_does_nothing(recipe, tmp_path):
    """SFT, and then pairs of its failures: the second run scores the first one's policy as its base."""
    text = recipe.read_text().replace("align:\n  loss: {name: tlm-dre}\n", "").replace("explore:", "_:")
    first = text[: text.index("_:")] + "worlds: {processes: 0}\nevaluate: {tasks: {split: test}}\n"
    then = {"explore": {"tasks": {"per_kind": 4, "skip": 4}, "samples": 2}, **PAIRS}
    recipe.write_text(f"{first}then: {json.dumps(then)}\n")

    done = CliRunner().invoke(app, ["run", str(recipe)], catch_exceptions=False)
    again = CliRunner().invoke(app, ["run", str(recipe)], catch_exceptions=False)

    runs = tmp_path / "runs"
    assert (done.exit_code, again.exit_code) == (0, 0)
    scores = [
        {
            row["name"]: row["mean_score"]
            for row in json.loads((runs / name / "summary.json").read_text())["policies"]
        }
        for name in ("one", "one-then")
    ]
    assert list(scores[0]) == ["base", "sft"]
    assert list(scores[1]) == ["base", "dpo"]
    assert scores[1]["base"] == scores[0]["sft"]
    assert (runs / "one-then" / "report.html").is_file()
    assert again.stderr.count("done before") == 10
    assert f"then: one-then starts from {runs}/one/checkpoints/sft, which its scores call base" in done.stdout


def test_the_second_recipe_has_the_same_simulated_user():
    """Else a script of the environment would write the user's turns."""
    recipe = one(then=PAIRS, user={"model": "gpt-4.1-mini"})

    assert following(recipe).user == recipe.user
