"""A package of somebody else adds an entry to each table: a whole run with it, its listing and its measurement."""

import ast
import json
import shutil
from dataclasses import dataclass
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.sections import Worlds
from perturn.credit import CreditTraits
from perturn.data.group_account import read_credits
from perturn.data.store import read_trajectories
from perturn.envs.abilities import abilities_of, ability
from perturn.envs.world_process import ProcessWorlds
from perturn.errors import ConfigError, PerturnError
from perturn.methods.siop.siop_credit import AnswerClusters
from perturn.needs import Answer, Needs
from perturn.quantities import wanted
from perturn.table_index import LISTED
from perturn.training.credit_choice import check_credit
from perturn.types import Task
from support.guests import GUEST, guest_entries, install_guest, visible

RECIPE = """
name: guests
output: runs
model: {name: tiny, dtype: float32}
environment: {name: guest-corridor}
worlds: {processes: 1}
protocol: {name: guest-rules}
engine: {name: guest-parrot, word: left}
backend: {name: guest-here}
sft: {loss: {name: sft}, tasks: {per_kind: 1}, learning_rate: 1.0e-3}
explore:
  name: guest-warm-up
  times: 3
  tasks: {per_kind: 2}
  samples: 2
  sampling: {temperature: 1.0, max_new_tokens: 4}
rows: {name: guest-near-groups, most: 1}
credit: {name: guest-entropy-rloo, unit: bits}
align: {loss: {name: guest-certainty-price, price: 0.1}, learning_rate: 1.0e-3}
evaluate:
  tasks: {split: test, per_kind: 1}
  sampling: {temperature: 1.0, max_new_tokens: 4}
  select: {name: guest-shortest, samples: 3}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with a policy and a recipe, in a process that has the package."""
    folder = tmp_path_factory.mktemp("guests")
    install_guest(folder / "site")
    shutil.copytree(tiny_folder, folder / "tiny")
    (folder / "recipe.yaml").write_text(RECIPE)
    with visible(folder / "site"), pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("PERTURN_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def perturn(place):
    """Call the command line: (exit code, standard output, notices)."""

    def call(*words):
        found = CliRunner().invoke(app, words, catch_exceptions=False)
        return found.exit_code, found.stdout, " ".join(found.stderr.split())

    return call


@pytest.fixture(scope="module")
def run(place, perturn):
    """The folder of a run with all entries of the package."""
    code, _, notices = perturn("run", "recipe.yaml")
    assert code == 0, notices
    return place / "runs" / "guests"


@pytest.mark.parametrize("file", sorted(GUEST.rglob("*.py")), ids=lambda file: file.name)
def test_the_package_imports_what_everybody_may_import(file):
    """`perturn.extend`, torch and the standard library."""
    imports = [
        each
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.Import | ast.ImportFrom)
    ]
    ours = {
        name
        for each in imports
        for name in ([each.module] if isinstance(each, ast.ImportFrom) else [one.name for one in each.names])
        if name.partition(".")[0] == "perturn"
    }

    assert ours <= {"perturn.extend", "perturn.extend.tensors", "perturn.extend.quantity_tools"}


def test_the_package_has_an_entry_for_each_table():
    """All but templates and recipes, which are files."""
    kinds = {group.removeprefix("perturn.").replace("_", "-") for group in guest_entries()}

    assert kinds == LISTED.keys() - {"templates", "recipes"} | {"abilities"}


@pytest.mark.parametrize("group", sorted(guest_entries().keys() - {"perturn.abilities"}))
def test_its_entries_are_listed(perturn, group):
    code, listed, _ = perturn("list", group.removeprefix("perturn.").replace("_", "-"), "--json")

    assert code == 0
    assert guest_entries()[group].keys() <= json.loads(listed).keys()


def test_a_quantity_is_listed_with_its_cost(perturn):
    """Beside ours; and the credit says that it reads it."""
    quantities = json.loads(perturn("list", "quantities", "--json")[1])
    credits = json.loads(perturn("list", "credits", "--json")[1])

    assert quantities["guest-token-entropy"]["cost"] == "a pass of the guest over the episodes"
    assert quantities["guest-token-entropy"]["reads"] == ["policy acted"]
    assert credits["guest-entropy-rloo"]["reads"] == ["guest-token-entropy", "groups"]
    assert credits["guest-entropy-rloo"]["cost"] == "a pass of the guest over the episodes"


def test_a_run_reads_each_entry(run):
    """Explorer, quantities, row maker, credit, loss with its input, selector, engine, environment and its ability."""
    stages = json.loads((run / "manifest.json").read_text())["stages"]
    explored = list(read_trajectories(run / "trajectories" / "explore.jsonl"))
    weighed = list(read_credits(run / "credits" / "guest-entropy-rloo.jsonl"))
    logged = [json.loads(line) for line in (run / "metrics" / "align.jsonl").read_text().splitlines()]
    base = next(read_trajectories(run / "evaluation" / "base.jsonl"))

    assert all(stage["done"] for stage in stages.values())
    assert len(explored) == 4 * 2 * 3
    assert {one.task.rpartition("/")[2] for one in weighed} == {"0"}
    assert all(entry["certainty"] < 0 for entry in logged if "loss" in entry)
    assert base.policy == "parrot-left"
    assert (run / "checkpoints" / "guest-certainty-price" / "config.json").is_file()


def test_the_manifest_has_the_versions_of_what_was_used(run):
    """The package's own, and what its environment names; nothing of environments that were not used."""
    versions = json.loads((run / "manifest.json").read_text())["versions"]

    assert versions["perturn-guest"] == "1.5"
    assert "filelock" in versions  # of the backend
    assert {"python", "perturn", "torch", "transformers", "pyyaml"} <= versions.keys()
    assert not {"scienceworld", "bm25s", "openai"} & versions.keys()


def test_an_ability_of_the_package_is_called_in_a_process(place):
    """The package adds its signature; any environment with the method then has the ability."""
    world = ProcessWorlds({"name": "guest-corridor"}, Worlds())()

    assert "doors" in abilities_of(world)
    assert ability(world, "doors")(Task("train-left/2", "left", "train")) == 3
    world.close()


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_what_a_setting_changes_is_said_at_its_field(perturn):
    """`patience` is marked as an effort, `word` is not."""
    assert perturn("report", "recipe.yaml", "engine.patience=3")[0] == 0

    with pytest.raises(PerturnError, match=r"another recipe: engine\.word is 'left' there and 'right' here"):
        perturn("report", "recipe.yaml", "engine.word=right")


def test_an_engine_says_before_work_what_is_wrong(perturn, place):
    with pytest.raises(ConfigError, match=r"engine\.word must be left or right, got 'up'"):
        perturn("run", "recipe.yaml", "name=wrong", "engine.word=up")

    assert not (place / "runs" / "wrong").exists()


@pytest.mark.slow
def test_a_quantity_is_in_the_cost_estimate_of_a_run(perturn):
    code, plan, _ = perturn("run", "recipe.yaml", "name=planned", "--dry-run")

    assert code == 0
    assert "read for guest-token-entropy" in " ".join(plan.split())


def test_the_bias_meter_gives_the_credit_its_exact_value(perturn):
    """Shares by a number that is known before the action leave signs, and bend the gradient."""
    code, found, _ = perturn("check-credit", "guest-entropy-rloo", "unit=bits", "--json")

    assert code == 0
    measured = json.loads(found)
    assert measured["needs"] == ["guest-token-entropy"]
    assert all(one["cosine"] > 0.9 for one in measured["measurements"])
    assert not measured["unbiased"]


def test_the_setting_of_a_request_reaches_its_quantity(perturn, run):
    """Entropies in another unit leave the same shares."""
    stages = json.loads((run / "manifest.json").read_text())["stages"]
    bits = stages["credit"]["counts"]["mean_entropy"]

    other = perturn("credit", str(run), "credit.name=guest-entropy-rloo", "--as", "nats", "--json")

    nats = json.loads(other[1])["iterations"][0]["mean_entropy"]
    again = {one.key: one.weight for one in read_credits(run / "credits" / "nats.jsonl")}
    for one in read_credits(run / "credits" / "guest-entropy-rloo.jsonl"):
        assert one.weight == pytest.approx(again[one.key], abs=1e-9)
    assert nats > 0
    assert bits > 0


@dataclass(frozen=True)
class OwnWords:
    """A credit whose settings have the names of settings of ours, and mean something else."""

    needs: ClassVar[Needs] = ("answer-clusters", Answer(last_gain=False))
    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)
    reference: str = "gold"
    same: str = "nowhere:to_be_found"
    members: int = 7
    last_gain: bool = True
    gamma: str = "half"
    singleton: str = "raw"
    unbiased: bool = True

    def __call__(self, group, **_):
        """Nothing."""
        return []


def test_settings_of_a_foreign_credit_mean_what_it_says_they_mean():
    """A quantity's settings are in the request alone, and traits in `traits` alone."""
    check_credit(OwnWords(), "own")

    found = {name: request for name, (_, request) in wanted(OwnWords().needs).items()}
    assert found == {"answer-clusters": AnswerClusters(), "answer": Answer(last_gain=False)}
    assert OwnWords().traits == CreditTraits(needs_group=True)


def test_a_misspelt_trait_is_rejected():
    """Such a credit would weigh every trajectory alone, without a warning."""

    class Misspelt(OwnWords):
        need_group = True

    class Beside(OwnWords):
        across_tasks = True

    with pytest.raises(ConfigError, match=r"'need_group'.* Did you mean `CreditTraits\(needs_group=...\)`"):
        check_credit(Misspelt(), "own")
    with pytest.raises(ConfigError, match=r"Did you mean `CreditTraits\(across_tasks=...\)`"):
        check_credit(Beside(), "own")


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        (("entropi",), "needs 'entropi', and nothing computes it. Did you mean 'entropy'"),
        (("values",), r"needs 'values' by its name alone, .* write Values\(...\) in needs"),
        (("answer", Answer()), "needs 'answer' twice"),
        (("perturn.types:Task",), "must be a subclass of perturn.quantities.Quantity"),
    ],
)
def test_needs_that_cannot_be_met_say_what_to_write(needs, says):
    with pytest.raises(ConfigError, match=says):
        wanted(needs, "credit own")
