"""From a study file to its cells: what is laid over the recipe, which points are tried, and what is refused."""

import pickle
import subprocess
import sys

import pytest

from perturn.errors import ConfigError
from perturn.study.cells import Plan, point_text, without_alignment
from perturn.study.settings import read_study

RECIPE = """
name: one
model: {name: m}
environment: {name: e}
protocol: {name: p}
sft: {loss: {name: sft}}
explore: {samples: 2}
rows: {name: expert-pairs, threshold: 0.5}
align: {loss: {name: tlm-dre, pivot: 0.8}, learning_rate: 1.0e-6}
evaluate: {sampling: {max_new_tokens: 7}}
"""
STUDY = """
name: small
recipe: one.yaml
seeds: [3, 4, 5]
methods:
  dpo: {align.loss: {name: dpo}}
  tlm-dre: {}
sweep: {align.learning_rate: [1e-6, 1.0e-5]}
tune: {tasks: {split: dev}, seeds: [3]}
test: {tasks: {split: test, n: 5}}
"""


@pytest.fixture
def plan(tmp_path):
    """Makes the plan of the study with `key=value` words."""
    (tmp_path / "one.yaml").write_text(RECIPE)
    (tmp_path / "study.yaml").write_text(STUDY)
    return lambda *words: Plan(*read_study(tmp_path / "study.yaml", words))


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_method_replaces_what_it_names_and_leaves_the_rest(plan):
    """The loss is another as a whole, so no setting of the recipe's loss is left; the rate of the point comes last."""
    cell = plan().cell("e", "dpo", {"align.learning_rate": 1e-5}, 4)

    assert cell.recipe.align.loss == {"name": "dpo"}
    assert cell.recipe.align.learning_rate == 1e-5
    assert cell.recipe.rows.threshold == 0.5
    assert cell.recipe.seed == 4
    assert cell.policy == "dpo"


def test_a_method_s_new_section_does_not_drop_the_rate_of_the_environment(plan):
    """Methods come after environments. A sweep comes last, so its rate replaces the dropped rate."""
    words = ["environments={e: {align.learning_rate: 1.0e-5}}", "methods={m: {align: {loss: {name: dmpo}}}}"]

    assert "would drop its learning_rate, 1e-05." in refusal(plan, *words, "sweep={}", "tune=null")
    cell = plan(*words).cell("e", "m", {"align.learning_rate": 2e-5}, 3)
    assert cell.recipe.align.learning_rate == 2e-5


def test_base_and_sft_are_always_there_and_lose_what_belongs_to_the_alignment(plan):
    """Without exploration, so that no cell of theirs plays what nobody learns from."""
    found = plan()

    assert list(found.study.methods) == ["base", "sft", "dpo", "tlm-dre"]
    assert found.study.baseline == "sft"
    base, sft = (found.cell("e", name, {}, 3) for name in ("base", "sft"))
    assert (base.policy, base.stages) == ("base", ["evaluate-base"])
    assert (sft.policy, sft.stages) == ("sft", ["expert", "evaluate-base", "sft", "evaluate-sft"])


def test_a_judge_of_evaluations_scores_every_policy(tmp_path, plan):
    """Else base and SFT are scored by other rewards than what they are compared with."""
    judge = "judge: {model: j, rubric: Is it polite, evaluates: true}"
    (tmp_path / "one.yaml").write_text(RECIPE + f"reward: {{{judge}}}\n")
    found = plan()

    base, sft, dpo = (found.cell("e", name, {}, 3).recipe for name in ("base", "sft", "dpo"))
    scoring = found.cell("e", "dpo", {"align.learning_rate": 1e-5}, 4).scoring_recipe("runs/x")

    assert all(one.judge.evaluates for one in (base, sft, dpo, scoring))
    reward = {"judge": {"evaluates": True}, "model": {}}
    assert without_alignment({"reward": reward}) == [
        "explore",
        "rows",
        "credit",
        "iterations",
        "staleness",
        "reward.model",
    ]
    said = refusal(lambda: plan("methods.sft={align: null, reward.model: {}}").points)
    assert "methods.sft.reward.model belongs to the alignment, and `align` is null" in said


def test_what_scores_a_policy_explores_nothing(tmp_path, plan):
    """Else `staleness` of the method is rejected where nothing is explored."""
    (tmp_path / "one.yaml").write_text(RECIPE + "iterations: 3\nstaleness: 1\n")
    cell = plan().cell("e", "dpo", {"align.learning_rate": 1e-5}, 4)
    scoring = cell.scoring_recipe("runs/x")

    assert (cell.recipe.iterations, cell.recipe.staleness) == (3, 1)
    assert (scoring.iterations, scoring.staleness, scoring.explore) == (1, 0, None)


def test_a_judge_of_training_goes_with_the_alignment(tmp_path, plan):
    judge = "judge: {model: j, rubric: Is it polite}"
    (tmp_path / "one.yaml").write_text(RECIPE + f"reward: {{{judge}}}\n")

    assert plan().cell("e", "sft", {}, 3).recipe.reward is None
    assert plan().cell("e", "dpo", {}, 3).recipe.judge is not None


def test_without_sft_the_baseline_is_the_model(tmp_path, plan):
    """A recipe that aligns a model as it is has no policy `sft`."""
    without = RECIPE.replace("sft: {loss: {name: sft}}\n", "")
    (tmp_path / "one.yaml").write_text(without)

    assert plan().study.baseline == "base"
    assert "sft" not in plan().study.methods


def test_the_tuning_task_list_is_played_on_its_seeds_alone(plan):
    """Other seeds train and are scored on the test tasks by a run of its own, and on nothing else."""
    tuned, other = (plan().cell("e", "dpo", {"align.learning_rate": 1e-5}, seed) for seed in (3, 4))

    assert (tuned.recipe.evaluate.tasks.split, tuned.recipe.evaluate.sampling.max_new_tokens) == ("dev", 7)
    assert other.recipe.evaluate is None
    scoring = tuned.scoring_recipe("runs/x/checkpoints/dpo")
    assert (scoring.evaluate.tasks.split, scoring.evaluate.tasks.n) == ("test", 5)
    assert scoring.evaluate.sampling.max_new_tokens == 7
    assert scoring.model.name == "runs/x/checkpoints/dpo"
    assert (scoring.sft, scoring.align, scoring.explore, scoring.rows) == (None, None, None, None)


def test_every_method_with_the_section_tries_every_combination(plan):
    """Two rates and two batch sizes are four points; `1e-6`, a text in YAML, is a number; base and sft have none."""
    found = plan("sweep={align.learning_rate: [1e-6, 1.0e-5], align.batch_size: [2, 4]}")

    assert found.points["e", "sft"] == [{}]
    assert found.points["e", "dpo"] == [
        {"align.learning_rate": rate, "align.batch_size": size} for rate in (1e-6, 1e-5) for size in (2, 4)
    ]
    assert point_text(found.points["e", "dpo"][0]) == "align.learning_rate=1e-06, align.batch_size=2"
    assert len(list(found.tuning())) == 2 + 2 * 4


@pytest.mark.parametrize("text", ["nan", "infinity", "1_0", "007", "5"])
def test_a_text_without_an_exponent_stays_a_text(plan, text):
    found = plan(f"sweep={{align.loss.kind: ['{text}', 2E5]}}")

    assert found.points["e", "dpo"] == [{"align.loss.kind": text}, {"align.loss.kind": 2e5}]


def test_a_method_may_sweep_other_settings_as_often(plan):
    """Dmpo has a discount to tune; two values are as many as two rates."""
    own = "methods.dmpo={align.loss: {name: dmpo}, sweep: {align.loss.gamma: [0.5, 0.9]}}"

    assert plan(own).points["e", "dmpo"] == [{"align.loss.gamma": 0.5}, {"align.loss.gamma": 0.9}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["methods.dmpo={sweep: {align.loss.beta: [1, 2, 3]}}"],
            "number of points of methods.dmpo must be 2, as of other methods, got 3",
        ),
        (
            ["methods.dmpo={sweep: {}}"],
            "number of points of methods.dmpo must be 2, as of other methods, got 1",
        ),
        (["methods.dmpo={sweep: [1]}"], "must have a list of values for each key"),
        (
            ["sweep={align.learning_rate: [0.1, 0.10]}"],
            "sweep: align.learning_rate must have values that differ",
        ),
        (
            [
                "sweep={}",
                "methods.dpo.sweep={align.beta: [1, 2]}",
                "methods.tlm-dre.sweep={rows.threshold: [1]}",
            ],
            "number of points of methods.tlm-dre must be 2",
        ),
        (["tune=null"], "sweep needs tasks to choose on"),
        (["tune.seeds=[7]"], "tune.seeds must be among the study's seeds [3, 4, 5], got [7]"),
        (["seeds=[1, 1]"], "seeds must differ"),
        (["seeds=[]"], "seeds is empty"),
        (["methods.dpo.credti=null"], "methods.dpo: unknown key 'credti'. Did you mean 'credit'?"),
        (["methods.dpo={expolre.samples: null}"], "unknown key 'expolre.samples'. Did you mean 'explore'?"),
        (
            ["methods.dpo={algin.los.nam: dpo}"],
            "'algin.los.nam'. Did you mean 'align'? In full: align.loss.name.",
        ),
        (
            ["methods.dpo={beta: 0.1}"],
            "methods.dpo: unknown key 'beta'. beta is a setting of the loss: write align",
        ),
        (["methods.dpo.sweep={algin.loss: [1, 2]}"], "methods.dpo.sweep: unknown key 'algin.loss'."),
        (["by_seed={paire.threshold: [null]}"], "by_seed: unknown key 'paire.threshold'."),
        (["sweep={paire.threshold: [1]}"], "sweep: unknown key 'paire.threshold'."),
        (["environments={here: {modle.name: null}}"], "environments.here: unknown key 'modle.name'."),
        (["methods.dpo={seed: 7}"], "methods.dpo: 'seed' is the study's to set in each cell; list seeds in"),
        (["methods.dpo={sweep: {seed: [1, 2]}}"], "methods.dpo.sweep: 'seed' is the study's"),
        (["by_seed={seed: [0, 0]}"], "by_seed: 'seed' is the study's"),
        (["environments={here: {seed: 7}}"], "environments.here: 'seed' is the study's"),
        (
            ["methods.dpo={name: mine}"],
            "methods.dpo: 'name' is the study's to set in each cell; leave it out",
        ),
        (["methods.dpo={output: mine}"], "'output' is the study's to set in each cell; set the study's own"),
        (
            ["methods.dpo={cluster.nodes: []}"],
            "'cluster.nodes' is the study's to set in each cell; set it in",
        ),
        (
            ["methods.dpo={evaluate.tasks.n: 5}"],
            "methods.dpo: 'evaluate.tasks.n' is the study's to set in each cell; set the study's own `test.tasks`",
        ),
        (["environments={here: {evaluate: {tasks: {n: 5}}}}"], "environments.here: 'evaluate.tasks' is the"),
        (
            ["methods.few={align: null, explore.samples: 9}"],
            "methods.few.explore.samples belongs to the alignment",
        ),
        (
            ["methods.few={align: null, iterations: 3}"],
            "methods.few.iterations belongs to the alignment",
        ),
        (
            ["methods.few={align: null, sweep: {credit.c: [1, 2]}}"],
            "methods.few.credit.c belongs to the alignment",
        ),
        (["baseline=dop"], "unknown baseline 'dop'. Did you mean 'dpo'?"),
        (["recipe=two.yaml"], "two.yaml' is no recipe file, run folder or bundled recipe."),
        (["method={}"], "unknown key 'method'. Did you mean 'methods'?"),
        (["methods.a/b={}"], "must be usable in a folder's name"),
    ],
)
def test_what_a_study_is_refused_for(plan, words, said):
    assert said in refusal(plan, *words)


def test_a_wrong_setting_of_a_method_names_the_method(plan):
    found = plan("methods.dpo={align.lossy: 1}")

    assert refusal(found.cell, "e", "dpo", {}, 3).startswith("e dpo: unknown key 'align.lossy'. Did you mean")


def test_settings_that_go_with_a_seed_begin_again(plan):
    """Two thresholds over three seeds: the third seed has the first one."""
    found = plan("by_seed={rows.threshold: [0.1, 0.2]}")

    assert [cell.recipe.rows.threshold for cell in found.testing("e", "dpo", {})] == [0.1, 0.2, 0.1]


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ([4, 5], [2, 3]),
        ([5], [3]),
        ([3, 4, 5, 9, 8], [1, 2, 3, 1, 2]),
        ([9, 5], [1, 3]),
        (["5"], [3]),
    ],
)
def test_a_seed_keeps_its_value_if_the_command_names_other_seeds(tmp_path, plan, seeds, expected):
    """A seed that the file lacks follows its last one, and begins the values again."""
    plan()
    file = tmp_path / "study.yaml"
    file.write_text(file.read_text() + "by_seed: {base.seed: [1, 2, 3]}\n")
    study, _ = read_study(file, [f"seeds={seeds}", "tune=null", "sweep={}"])

    assert study.by_seed == {"base.seed": expected}


def test_values_and_seeds_that_the_command_names_go_together(plan):
    found = plan("seeds=[5]", "by_seed={rows.threshold: [0.1, 0.2]}", "tune=null", "sweep={}")

    assert found.study.by_seed == {"rows.threshold": [0.1, 0.2]}


def test_a_file_without_seeds_has_seed_0(tmp_path, plan):
    plan()
    file = tmp_path / "study.yaml"
    words = file.read_text().replace("seeds: [3, 4, 5]\n", "by_seed: {base.seed: [1, 2, 3]}\n")
    file.write_text(words.replace("seeds: [3]}", "seeds: [0]}"))

    assert read_study(file, ["seeds=[5, 0]"])[0].by_seed == {"base.seed": [2, 1]}
    assert read_study(file)[0].by_seed == {"base.seed": [1, 2, 3]}


def test_environments_are_laid_below_methods(plan):
    """Each has cells of its own, whose runs carry its name."""
    found = plan(
        "environments={easy: {environment.level: 1, rows.threshold: 0.1}, hard: {environment.level: 2}}"
    )
    easy, hard = (found.cell(name, "dpo", {}, 3) for name in ("easy", "hard"))

    assert (easy.recipe.environment["level"], easy.recipe.rows.threshold) == (1, 0.1)
    assert (hard.recipe.environment["level"], hard.recipe.rows.threshold) == (2, 0.5)
    assert hard.recipe.name.startswith("hard-dpo-seed-3-")


def test_a_run_is_named_by_all_that_changes_what_it_makes(plan, tmp_path):
    """Not by where and how fast it works; and the sft run not by the alignment, which is nothing to it."""

    def names(*words, recipe=RECIPE):
        (tmp_path / "one.yaml").write_text(recipe)
        return [plan(*words).cell("e", method, {}, 3).recipe.name for method in ("dpo", "sft")]

    dpo, sft = names()
    assert names(recipe=RECIPE + "worlds: {processes: 3}\nreport_to: [wandb]\n") == [dpo, sft]
    aligned = names(recipe=RECIPE.replace("threshold: 0.5", "threshold: 0.6"))
    assert (aligned[0] != dpo, aligned[1] == sft) == (True, True)
    assert names("tune.tasks.n=3")[1] != sft


def test_a_process_that_gets_a_cell_knows_the_names_of_its_own_classes(tmp_path, plan):
    """A row maker from a file, in a new process. The processes of a study need the name to plan their stages."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom perturn.rows.group_pairs import GroupPairs\n"
        "@dataclass(frozen=True)\nclass Mine(GroupPairs):\n    pass\n"
    )
    rows = f"methods.dpo.rows={{name: '{tmp_path / 'mine.py'}:Mine', per_group: 2}}"
    cell = next(cell for cell in plan(rows).tuning() if cell.method == "dpo")
    (tmp_path / "cell").write_bytes(pickle.dumps(cell))
    code = "import pickle, sys; print(*pickle.load(open(sys.argv[1], 'rb')).stages)"

    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "cell"], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == cell.stages
    assert pickle.loads(pickle.dumps(cell)) == cell
