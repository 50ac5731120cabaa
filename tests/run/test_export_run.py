"""What others are given: rows that read back alike, and a policy with a card that a run's numbers stand in."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
import yaml
from transformers import AutoModelForCausalLM

from perturn.engines.tinker.stored_policy import StoredPolicy
from perturn.errors import ConfigError, DataError, RunError
from perturn.formats.trl_rows import from_trl, to_trl
from perturn.report import summarize
from perturn.run import export_run
from perturn.run.execute import open_run, run_stages
from perturn.run.export_run import as_dataset, export_policy, export_rows, push
from perturn.run.served_policy import _policy_of
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn

from .online import GROUPS, recipe_of

TOOLS = ({"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}},)
CALL = ({"type": "function", "function": {"name": "ask", "arguments": {"what": "time"}}},)


def heard(text, role="user"):
    return ({"role": role, "content": text},)


def played(*actions, task="t"):
    """A worked example, then a turn an action; the first is a call if there are two."""
    turns = [Turn(heard(f"see {n}"), Action(text)) for n, text in enumerate(actions)]
    if len(turns) > 1:
        turns[0] = Turn(heard("see 0"), Action(actions[0], tool_calls=CALL))
        turns[1] = Turn(({"role": "tool", "name": "ask", "content": "noon"},), turns[1].action)
    prompt = (*heard("Play.", "system"), *heard("Example."), {"role": "assistant", "content": "Done."})
    return Trajectory(Task(task), tuple(turns), prompt=prompt, tools=TOOLS)


def test_a_trajectory_is_read_back_with_its_turns():
    """The worked example stays in the prompt, and carries no loss."""
    before = played("look", "go")

    after = from_trl(json.loads(json.dumps(to_trl(before))), task_id="t")

    assert (after.turns, after.prompt, after.tools) == (before.turns, before.prompt, before.tools)


@pytest.mark.parametrize("more", [{}, {"reasoning": "hm"}, {"tool_calls": CALL}])
def test_a_cut_answer_is_read_back_as_cut(more):
    """No end token carries loss, and an answer that was cut inside a call carries none."""
    turns = (Turn(heard("see"), Action("a cu", ended=False, **more)), Turn(heard("see"), Action("go")))

    after = from_trl(json.loads(json.dumps(to_trl(Trajectory(Task("t"), turns)))), task_id="t")

    assert after.turns == turns
    assert after.turns[0].carries_loss == ("tool_calls" not in more)


def several(*texts):
    """An episode in which each turn begins a conversation."""
    turns = [Turn(heard("see"), Action(text), follows=-1) for text in texts]
    return Trajectory(Task("t"), tuple(turns))


@pytest.fixture
def holding(monkeypatch):
    """Return a function that gives all runs the same explored episodes."""
    monkeypatch.setattr(export_run, "begun", lambda run: SimpleNamespace(folder=run))
    monkeypatch.setattr(export_run, "read_manifest", lambda folder: {"files": {}})
    return lambda *episodes: monkeypatch.setattr(export_run, "_rows", lambda _: {"explored": episodes})


def test_episodes_of_several_conversations_are_left_out(holding, tmp_path, caplog):
    """Marks that TRL ignores are counted too."""
    cut = Trajectory(Task("t"), (Turn(heard("see"), Action("a cu", ended=False)),))
    holding(several("a", "b"), cut, played("look"))

    assert export_rows(tmp_path, "trl", tmp_path / "out") == {"explored": 2}
    assert "rows left out because an agent has several conversations: 1" in caplog.text
    assert "1 answers are marked as without loss" in caplog.text


def test_rows_without_loss_are_left_out(holding, tmp_path, caplog):
    """`from_trl` would reject the whole file."""
    cut = Action("", (1, 2), (-0.5, -0.5), ended=False, tool_calls=CALL)  # the row has no tokens
    holding(Trajectory(Task("t"), (Turn(heard("see"), cut),)), played("look"))

    assert export_rows(tmp_path, "trl", tmp_path / "out") == {"explored": 1}
    assert "rows left out because no answer in them carries loss: 1" in caplog.text


def test_without_any_row_of_one_conversation_the_export_says_why(holding, tmp_path):
    holding(several("a", "b"))

    with pytest.raises(RunError, match="Rows with several conversations: 1; rows without loss: 0"):
        export_rows(tmp_path, "trl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pair_is_read_back_with_both_sides():
    """With one prompt for both."""
    before = PreferencePair(played("look", "go"), played("look", "stay"))

    after = from_trl(to_trl(before), task_id="t")

    assert after.chosen.turns == before.chosen.turns
    assert after.rejected.turns == before.rejected.turns


def test_a_pair_of_two_prompts_cannot_be_said():
    """TRL's row has one."""
    other = Trajectory(Task("t"), (Turn(heard("else"), Action("go")),))

    with pytest.raises(DataError, match="begin with different prompts"):
        to_trl(PreferencePair(played("look"), other))


def test_a_pair_of_different_tools_is_not_exported():
    """TRL's row has one column of tools."""
    pair = PreferencePair(played("look"), replace(played("go"), tools=()))

    with pytest.raises(
        DataError, match=r"task 't': chosen and rejected have different tools, .* with equal tools"
    ):
        to_trl(pair)


def test_a_dataset_keeps_each_value_and_column():
    """Arguments of two types, arguments of other calls, and a column that the first row lacks."""
    other = ({"type": "function", "function": {"name": "tell", "arguments": {"what": 3, "when": "now"}}},)
    turns = [Turn(heard("see"), Action("", tool_calls=calls)) for calls in (CALL, other)]
    rows = [to_trl(Trajectory(Task("t"), (turn,), tools=TOOLS[:at])) for at, turn in enumerate(turns)]

    made = list(as_dataset(rows))

    assert made == [{**rows[0], "tools": None}, rows[1]]


def test_a_number_that_a_dataset_cannot_store_is_named():
    """10**23 does not fit in 64 bits."""
    calls = [{"type": "function", "function": {"name": "pay", "arguments": {"n": n}}} for n in (1, 10**23)]
    turns = [Turn(heard("see"), Action("", tool_calls=(call,))) for call in calls]
    rows = [to_trl(Trajectory(Task("t"), (turn,), tools=TOOLS)) for turn in turns]

    with pytest.raises(DataError, match=r"row 2 of 2 holds a whole number .* Export the rows with --to trl"):
        as_dataset(rows)


RECIPE = """
name: one
output: {output}
model: {{name: "{model}", dtype: float32}}
environment: {{name: "own_environment:GuessNumber"}}
protocol: {{name: tiny, format: action, system: Guess., max_turns: 2}}
sft: {{loss: {{name: sft}}, tasks: {{n: 2}}}}
explore: {{tasks: {{n: 2}}, sampling: {{temperature: 1.0, max_new_tokens: 4}}}}
align: {{loss: {{name: tlm-dre}}}}
evaluate: {{tasks: {{split: test, n: 2}}, sampling: {{max_new_tokens: 4}}}}
worlds: {{processes: 0}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder, own_environment):
    """A whole run of the tiny model on two tasks."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.yaml").write_text(RECIPE.format(output=folder, model=tiny_folder))
    with open_run(folder / "recipe.yaml") as opened:
        run_stages(opened)
    return opened.folder


@pytest.mark.parametrize("form", ["trl", "datasets"])
def test_rows_are_what_the_run_holds(run, tmp_path, form):
    """As JSONL that `datasets` and TRL read, or as a DatasetDict; a second call overwrites nothing."""
    counts = export_rows(run, form, tmp_path / "out")

    if form == "datasets":
        read = datasets.load_from_disk(tmp_path / "out")
    else:
        cache = str(tmp_path / "cache")
        read = {
            file.stem: datasets.load_dataset("json", data_files=str(file), cache_dir=cache)["train"]
            for file in (tmp_path / "out").iterdir()
        }
    assert counts == {"pairs": 2, "expert": 2, "explored": 2}
    assert {name: len(rows) for name, rows in read.items()} == counts
    assert {"prompt", "chosen", "rejected"} <= set(read["pairs"].column_names)
    with pytest.raises(RunError, match="exists and is left as it is"):
        export_rows(run, form, tmp_path / "out")


def test_a_policy_goes_with_its_scores_and_its_recipe(run, tmp_path):
    """The folder loads as it is; the card has what `report` says, and its head is YAML."""
    name = export_policy(run, tmp_path / "out")

    assert name == "tlm-dre"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"
    head, _, text = (tmp_path / "out" / "README.md").read_text().removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["tags"] == ["perturn", "agent", "tlm-dre"]
    assert "base_model" not in yaml.safe_load(head)  # it is a folder of ours
    for row in summarize(run)["policies"]:
        assert f"| {row['name']} | 2 | {row['mean_score']:.3f} " in text
    assert "tiny-action on guess-number-1.0; split test, n = 2, task list" in text
    assert (run / "recipe.yaml").read_text().strip() in text


def test_any_trained_policy_can_be_had(run, tmp_path):
    """By its name; another is refused with the nearest."""
    assert export_policy(run, tmp_path / "sft", "sft") == "sft"
    with pytest.raises(RunError, match="has no trained policy 'tlm-dpo'"):
        export_policy(run, tmp_path / "other", "tlm-dpo")
    assert not (tmp_path / "other").exists()


def test_weights_at_a_service_are_not_exported(run, tmp_path):
    """The folder of such a policy has no weights, and names the service's address."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    StoredPolicy("tinker://m/weights/a", "base", 8, "https://service.example").write(
        copy / "checkpoints/tlm-dre"
    )

    with pytest.raises(
        RunError, match=r"the weights of policy 'tlm-dre' are at https://service\.example, not in"
    ):
        export_policy(copy, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_the_policy_that_is_served_is_no_reward_model(place):
    """A run that was stopped between the training of its reward model and of its policy."""
    reward = "reward={model: {learning_rate: 3.0e-3, batch_size: 2, epochs: 2}}"
    recipe = recipe_of(
        place, *GROUPS, "credit.name=oprl", reward, "iterations=2", f"output={place}", "name=stopped"
    )
    for name in ("ppo-clip-001", "prm-002"):
        folder = place / "stopped" / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    assert [_policy_of(recipe, name)[0] for name in ("", "prm-002")] == ["ppo-clip-001", "prm-002"]


def test_the_hub_is_given_the_folder(tmp_path, monkeypatch):
    """A repository is made if there is none, and the folder uploaded; its address comes back."""
    calls = []

    class Hub:
        def create_repo(self, repo, **settings):
            calls.append((repo, settings))
            return f"https://huggingface.co/{repo}"

        def upload_folder(self, **settings):
            calls.append(settings)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)

    assert push(tmp_path, "me/policy", private=True) == "https://huggingface.co/me/policy"
    assert calls == [
        ("me/policy", {"private": True, "exist_ok": True}),
        {"repo_id": "me/policy", "folder_path": str(tmp_path)},
    ]


def test_an_upload_that_fails_loses_nothing(tmp_path, monkeypatch):
    """One line says why, and what uploads the folder that is there already."""

    class Hub:
        def create_repo(self, repo, **settings):
            raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)

    with pytest.raises(RunError) as caught:
        push(tmp_path, "me/policy", private=True)

    assert "ConnectionError: Name or service not known; " in str(caught.value)
    assert f"hf upload me/policy {tmp_path} --private" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_export_for_datasets_without_the_library_is_refused(tmp_path, monkeypatch):
    """It comes with an extra, and the message names the extra."""
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(ConfigError, match=r'needs datasets; run: pip install "perturn\[datasets\]"'):
        export_rows(tmp_path, "datasets", tmp_path / "out")
