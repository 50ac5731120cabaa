"""A run whose protocol shows the last two turns alone: taught, aligned and scored under it."""

import json

import pytest

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.data.store import read_pairs, read_trajectories
from perturn.report import write_report
from perturn.run.execute import open_run, run_stages
from perturn.training.turn_config import TurnConfig
from perturn.training.turn_trainer import TurnTrainer

STAIRS = '''
from perturn.types import Observation, Task


class Stairs:
    """Five steps up; a word that is none of a step leads nowhere."""

    name = "stairs-1.0"

    def tasks(self, split):
        return [Task(f"{split}/{n}", "stairs", split) for n in range(4)]

    def reset(self, task, seed):
        self.step_now = 0
        return Observation(f"Task {task.id}: climb.", admissible=("up",))

    def step(self, action):
        self.step_now += action == "up"
        done = self.step_now == 5
        said = f"You are on step {self.step_now}."
        return Observation(said, float(done), done, done, action == "up", admissible=("up", f"jump {self.step_now}"))

    def expert(self, task):
        return ["up"] * 5

    def close(self):
        pass
'''
RECIPE = """
name: short
output: runs
model: {name: "MODEL", dtype: float32}
environment: {name: "perturn_stairs:Stairs"}
protocol: {name: tiny, format: action, system: Climb., max_turns: 6, history: 2, list_admissible: true}
sft:
  loss: {name: sft}
  tasks: {per_kind: 2}
  learning_rate: 1.0e-3
explore:
  tasks: {per_kind: 2, skip: 2}
  sampling: {temperature: 1.0, max_new_tokens: 5}
align:
  loss: {name: tlm-dre}
  batch_size: 2
  learning_rate: 1.0e-3
evaluate:
  tasks: {split: test, per_kind: 2}
  sampling: {max_new_tokens: 5}
worlds: {processes: 0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_folder):
    """The folder of the run, done from its recipe to its report."""
    place = tmp_path_factory.mktemp("short")
    (place / "perturn_stairs.py").write_text(STAIRS)
    (place / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(tiny_folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        patch.setenv("PERTURN_CACHE", str(place / "cache"))
        with open_run("recipe.yaml") as run:
            run_stages(run)
            write_report(run.folder)
            return run.folder.absolute()


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_sft_and_alignment_train_on_each_turn_as_it_was_seen(folder, tiny_folder):
    """Five turns an expert episode; tokens are those of all its sequences, and the losses are finite numbers."""
    stages = json.loads((folder / "manifest.json").read_text())["stages"]
    renderer = Renderer(load_tokenizer(str(tiny_folder)))
    taught = [
        one for one in read_trajectories(folder / "trajectories/expert.jsonl") if one.task.id < "train/2"
    ]

    encoded = [renderer.encode(one) for one in taught]
    counts = stages["sft"]["counts"]

    assert [len(one.starts) for one in encoded] == [5, 5]
    assert (counts["turns"], counts["tokens"]) == (10, sum(len(one.ids) for one in encoded))
    assert "step 1" not in renderer.tokenizer.decode(encoded[0].ids[encoded[0].sequences[4]])
    assert stages["align"]["counts"]["examples"] == len(read_pairs(folder / "pairs.jsonl")) == 2
    assert all(0 < row["loss"] < 1e3 for row in lines(folder / "metrics/sft.jsonl"))


def test_an_episode_stays_one_trajectory(folder):
    """One row per pair with a weight per turn.

    And the engine's log-probabilities of its prompts are training's.
    """
    rows = lines(folder / "metrics/confidence.jsonl")
    pairs = read_pairs(folder / "pairs.jsonl")

    for pair, row in zip(pairs, rows, strict=True):
        for side in ("chosen", "rejected"):
            turns = len(getattr(pair, side).turns)
            assert row[side]["turn"] == list(range(turns))
            assert len(row[side]["weight"]) == turns
    agreement = json.loads((folder / "metrics/agreement.json").read_text())
    assert agreement["tokens"] == sum(
        len(turn.action.token_ids) for one in pairs for turn in one.rejected.turns
    )
    assert agreement["max"] < 1e-4


def test_alignment_notes_the_ranking_accuracy_before_and_after(folder, tmp_path):
    """Before: the pairs whose chosen side the reference finds likelier. After: by a pass of the saved policy."""
    noted = json.loads((folder / "metrics" / "ranking.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics" / "reference.jsonl").read_text().splitlines()]
    sums = [[sum(row[side]["logprobs"]) for side in ("chosen", "rejected")] for row in rows]
    args = TurnConfig(output_dir=str(tmp_path), loss={"name": "dpo"}, use_cpu=True, disable_tqdm=True)
    pairs = list(read_pairs(folder / "pairs.jsonl"))
    again = TurnTrainer(str(folder / "checkpoints" / "tlm-dre"), args, train_dataset=pairs)
    examples = again.train_dataset.rows

    assert noted == {
        "pairs": len(rows),
        "before": sum(chosen > rejected for chosen, rejected in sums) / len(rows),
        "after": sum(bool(one.reference[0].sum() > one.reference[1].sum()) for one in examples) / len(rows),
    }
    assert noted["pairs"] >= 2
    assert json.loads((folder / "summary.json").read_text())["iterations"][0]["training"]["ranking"] == noted
    assert f"Ranking accuracy on {len(rows)} pairs" in (folder / "report.html").read_text()


def test_the_evaluation_plays_under_the_same_protocol(folder):
    """Every policy's episodes are played with sight of two turns, and the scores say so."""
    for policy in ("base", "sft", "tlm-dre"):
        played = list(read_trajectories(folder / f"evaluation/{policy}.jsonl"))
        assert [one.history for one in played] == [2, 2]
    assert "history of 2 turns" in (folder / "report.html").read_text()
