"""A credit with a quantity of its own, both of someone else's package: listed, costed, measured and trained with."""

import json
import shutil
from dataclasses import dataclass
from typing import ClassVar

import pytest
from typer.testing import CliRunner

import guest_quantity
from perturn.cli import app
from perturn.credit import CREDITS, CreditTraits
from perturn.data.group_account import read_credits
from perturn.errors import ConfigError
from perturn.methods.siop.siop_credit import AnswerClusters
from perturn.needs import Answer, Needs
from perturn.quantities import QUANTITIES, wanted
from perturn.training.credit_choice import check_credit

WORLD = '''
from perturn.types import Observation, Task


class Letters:
    """Two turns; each is rewarded whose action begins with a letter of the first half of the alphabet."""

    name = "letters-1.0"

    def tasks(self, split):
        return [Task(f"{split}/{n}", "", split) for n in range(4)]

    def reset(self, task, seed):
        self.turns = 0
        return Observation(f"Task {task.id}: say something.")

    def step(self, action):
        self.turns += 1
        good = action[:1].lower() in [*"abcdefghijklm"]
        return Observation("Go on.", reward=0.5 * good, terminated=self.turns == 2, success=good)

    def close(self):
        pass
'''
RECIPE = """
name: entropies
output: runs
model: {name: tiny, dtype: float32}
environment: {name: "own_letters:Letters"}
protocol: {name: tiny, format: action, system: Talk., max_turns: 3}
iterations: 2
explore:
  tasks: {split: train, n: 2}
  samples: 4
  sampling: {temperature: 1.0, max_new_tokens: 4}
rows: {name: groups}
credit: {name: guest-entropy-rloo, unit: bits}
align: {loss: {name: ppo-clip}, learning_rate: 1.0e-3}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with a policy, a world and a recipe, in a process that has the package."""
    folder = tmp_path_factory.mktemp("entropies")
    guest_quantity.install(folder / "site")
    shutil.copytree(tiny_folder, folder / "tiny")
    (folder / "own_letters.py").write_text(WORLD)
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder / "site")
        patched.chdir(folder)
        for table in (CREDITS, QUANTITIES):  # entry points are read once
            patched.delitem(vars(table), "_foreign", raising=False)
        yield folder
        for table in (CREDITS, QUANTITIES):
            vars(table).pop("_foreign", None)


@pytest.fixture(scope="module")
def perturn(place):
    """Call the command line: (exit code, standard output)."""

    def call(*words):
        found = CliRunner().invoke(app, words, catch_exceptions=False)
        return found.exit_code, found.stdout

    return call


def test_a_foreign_quantity_is_listed_with_its_cost(perturn):
    """Beside ours; and the credit says that it reads it."""
    quantities = json.loads(perturn("list", "quantities", "--json")[1])
    credits = json.loads(perturn("list", "credits", "--json")[1])

    assert quantities["guest-token-entropy"]["cost"] == "a pass of the guest over the episodes"
    assert quantities["guest-token-entropy"]["reads"] == ["policy acted"]
    assert credits["guest-entropy-rloo"]["reads"] == ["guest-token-entropy", "groups"]
    assert credits["guest-entropy-rloo"]["cost"] == "a pass of the guest over the episodes"


@pytest.mark.slow
def test_it_is_in_the_cost_estimate_of_a_run(perturn):
    code, plan = perturn("run", "recipe.yaml", "--dry-run")

    assert code == 0
    assert "read for guest-token-entropy" in " ".join(plan.split())


def test_the_bias_meter_gives_the_credit_its_exact_value(perturn):
    """Shares by a number that is known before the action leave signs, and bend the gradient."""
    code, found = perturn("check-credit", "guest-entropy-rloo", "unit=bits", "--json")

    assert code == 0
    measured = json.loads(found)
    assert measured["needs"] == ["guest-token-entropy"]
    assert all(one["cosine"] > 0.9 for one in measured["measurements"])
    assert not measured["unbiased"]


@pytest.mark.slow
def test_a_run_computes_it_and_trains(perturn, place):
    """Of the policy that acted in each iteration, with the setting of the request; its figures are noted."""
    code, _ = perturn("run", "recipe.yaml")
    assert code == 0
    run = place / "runs" / "entropies"
    stages = json.loads((run / "manifest.json").read_text())["stages"]

    assert all(stage["done"] for stage in stages.values())
    bits = [stages[f"credit-00{number}"]["counts"]["mean_entropy"] for number in (1, 2)]
    assert all(number > 0 for number in bits)
    assert (run / "credits" / "guest-entropy-rloo-002.jsonl").is_file()
    other = perturn("credit", str(run), "credit.name=guest-entropy-rloo", "--as", "nats", "--json")
    nats = [one["mean_entropy"] for one in json.loads(other[1])["iterations"]]
    weights = [read_credits(run / "credits" / f"{name}-002.jsonl") for name in ("guest-entropy-rloo", "nats")]
    for one, again in zip(*weights, strict=True):  # shares have no unit
        assert one.weight == pytest.approx(again.weight, abs=1e-9)
    assert nats == pytest.approx([each * 0.693147 for each in bits], rel=1e-3)


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
