"""The mask audit: every token of every side, with its turn and whether it carries loss."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from perturn.audit import audit, drawn_by, inspect, inspect_json
from perturn.cli import app
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe, read_recipe
from perturn.data.records import line_of
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, write_pairs
from perturn.errors import ConfigError
from perturn.types import Action, PreferencePair, Status, Task, Trajectory, Turn, WeightedTrajectory
from support.audited import record, say, shown, write


def played(*actions, reward=1.0, **changes):
    """A trajectory that hears `seen 0`, `seen 1`, ... and answers with the actions."""
    turns = tuple(Turn(tuple(say(f"seen {i}")), Action(text)) for i, text in enumerate(actions))
    return Trajectory(
        Task("t/0"), turns, prompt=({"role": "system", "content": "Play."},), total_reward=reward, **changes
    )


PAIR = PreferencePair(played("Action: go", "Action: take it"), played("Action: no", reward=0.0, sample=1))
TRL_PAIR = {
    "prompt": say("question"),
    "chosen": say("", "good answer", "more?", "yes")[1:],
    "rejected": say("", "bad")[1:],
}


@pytest.fixture(params=["trajectories", "pairs", "run", "trl pair", "trl messages"])
def data(request, tmp_path):
    """A data file in each form: (path, actions of the chosen side, actions of the rejected side)."""
    file = tmp_path / "data.jsonl"
    both = (["Action: go", "Action: take it"], ["Action: no"])
    if request.param == "trajectories":
        with TrajectoryStore(file) as store:
            store.append(PAIR.chosen)
        return file, both[0], []
    if request.param == "pairs":
        write_pairs(file, [PAIR])
        return file, *both
    if request.param == "run":
        write_pairs(tmp_path / "pairs.jsonl", [PAIR])
        return tmp_path, *both
    if request.param == "trl pair":
        return write(file, TRL_PAIR), ["good answer", "yes"], ["bad"]
    return write(file, {"messages": say("a", "b", "c", "d")}), ["b", "d"], []


def test_episodes_that_failed_are_left_out(tmp_path, tiny_folder):
    """Such as a session that was open when its endpoint was killed, which has no turns."""
    file = tmp_path / "data.jsonl"
    with TrajectoryStore(file) as store:
        store.append(played(status=Status.FAILED, error="lost"))
        store.append(replace(PAIR.chosen, sample=1))

    rows = list(inspect_json(file, str(tiny_folder)))

    assert len(rows) == 1


def test_rows_with_a_failed_side_are_left_out(tmp_path, tiny_folder):
    """As by the audit, which counts one usable row of three."""
    file, lost = tmp_path / "rows.jsonl", replace(PAIR.rejected, status=Status.FAILED, error="lost")
    rows = [replace(PAIR, rejected=lost), WeightedTrajectory(lost, (1.0,)), PAIR]
    file.write_bytes(b"".join(line_of(each) for each in rows))
    found = audit(file, str(tiny_folder))["parts"]["rows"]

    assert len(list(inspect_json(file, str(tiny_folder)))) == found["usable"] == 1
    assert "1 rows, 2 trajectories" in shown(file, tiny_folder, None)


def test_the_loss_tokens_are_the_actions_and_their_end_tokens(data, tiny_folder):
    """Joined in order they give each action followed by <|im_end|>; every turn is there, and nothing else."""
    file, *expected = data

    (row,) = [json.loads(line) for line in inspect_json(file, str(tiny_folder))]

    assert list(row) == ["chosen", "rejected"]
    for side, actions in zip(row.values(), expected, strict=True):
        loss = [token for token in side if token["loss"]]
        assert "".join(token["text"] for token in loss) == "".join(
            f"{action}<|im_end|>" for action in actions
        )
        assert sorted({token["turn"] for token in loss}) == list(range(len(actions)))
        assert all(token["role"] == "assistant" for token in loss)
        assert all(
            token["turn"] is None and token["role"] != "assistant" for token in side if not token["loss"]
        )
        assert all(list(token) == ["id", "text", "role", "turn", "loss"] for token in side)


def test_all_tokens_joined_are_the_rendered_conversation(tiny_folder, tokenizer, tmp_path):
    """Up to the last end token the tokens are the chat template's text, so the audit shows what is trained on."""
    messages = say("a", "b", "c", "d")
    file = write(tmp_path / "rows.jsonl", {"messages": messages})

    (row,) = [json.loads(line) for line in inspect_json(file, str(tiny_folder))]

    text = "".join(token["text"] for token in row["chosen"])
    assert text == tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    assert tokenizer.decode([token["id"] for token in row["chosen"]]) == text


def test_the_json_has_one_line_a_row_up_to_the_limit(tiny_folder, tmp_path):
    """Five rows; three are asked for."""
    file = write(tmp_path / "rows.jsonl", *[{"messages": say("a", str(n))} for n in range(5)])

    counts = [len(list(inspect_json(file, str(tiny_folder), limit=limit))) for limit in (None, 3, 0)]

    assert counts == [5, 3, 0]


def test_a_length_limit_drops_whole_turns(tiny_folder, tmp_path):
    """A first turn fits in 60 tokens, both do not."""
    file = write(tmp_path / "rows.jsonl", {"messages": say("a", "b", "c " * 60, "d")})

    (row,) = [json.loads(line) for line in inspect_json(file, str(tiny_folder), max_length=60)]

    assert "".join(token["text"] for token in row["chosen"] if token["loss"]) == "b<|im_end|>"


def test_a_factor_on_the_clip_range_is_shown_with_its_turn(tiny_folder, tmp_path):
    """Beside the weight, where a row has one; elsewhere nothing is said of it."""
    file = tmp_path / "rows.jsonl"
    one = played("Action: a", "Action: b")
    file.write_bytes(line_of(WeightedTrajectory(one, (0.5, -1.0), (0.75, 1.25))))
    text = shown(file, tiny_folder, None)
    file.write_bytes(line_of(WeightedTrajectory(one, (0.5, -1.0))))
    without = shown(file, tiny_folder, None)

    assert re.findall(r"w=(\S+) clip=(\S+)\]", text) == [("0.5", "0.75"), ("-1", "1.2")]
    assert "w=0.5]" in without


def test_a_row_that_is_played_on_is_shown_with_the_loss_that_it_says(tiny_folder, tmp_path):
    """No run is there whose credit would say it."""
    file = tmp_path / "rows.jsonl"
    branch = replace(played("Action: a", "Action: b"), origin=0, taken_over=1)
    found = []
    for own_turns in (True, None):
        file.write_bytes(line_of(WeightedTrajectory(branch, (0.5, -1.0), own_turns=own_turns)))
        (row,) = [json.loads(line) for line in inspect_json(file, str(tiny_folder))]
        turns = audit(file, str(tiny_folder))["parts"]["rows"]["turns"]
        found.append(({token["turn"] for token in row["chosen"] if token["loss"]}, turns))

    assert found == [({1}, 1), ({0, 1}, 2)]


def test_each_turn_of_a_shortened_history_is_shown_as_the_policy_saw_it(tiny_folder, tmp_path):
    """Without sight of earlier turns: three sequences, each opens with the task and carries loss on its own turn."""
    file = tmp_path / "rows.jsonl"
    with TrajectoryStore(file) as store:
        store.append(played("Action: a", "Action: b", "Action: c", history=0))
    (row,) = [json.loads(line) for line in inspect_json(file, str(tiny_folder))]
    sequences = [[token for token in row["chosen"] if token["sequence"] == number] for number in range(3)]

    text = shown(file, tiny_folder, None)

    for number, tokens in enumerate(sequences):
        assert {token["turn"] for token in tokens} == {None, number}
        assert "seen 0" in "".join(token["text"] for token in tokens)
    longest = max(map(len, sequences))
    assert text.count("--- the next turn, as the policy saw it ---") == 2
    assert [f"[{turn}: p=" in text for turn in range(4)] == [True, True, True, False]
    assert f"3 turns; {len(row['chosen'])} tokens" in text
    assert f"longest {longest} tokens" in text
    assert audit(file, str(tiny_folder))["parts"]["rows"]["lengths"]["tokens"]["max"] == longest


def test_the_coloured_output_has_weights_and_totals(tiny_folder, tmp_path):
    """The tiny policy is unsure of every turn, so tlm-dre weighs each with `high`; totals agree with the JSON."""
    write_pairs(tmp_path / "pairs.jsonl", [PAIR, PAIR])
    (row, _) = [json.loads(line) for line in inspect_json(tmp_path, str(tiny_folder))]
    tokens = [token for side in row.values() for token in side]

    text = shown(tmp_path, tiny_folder, "tlm-dre", limit=1)

    carrying = 2 * sum(token["loss"] for token in tokens)
    assert text.count("w=1]") == 3
    assert "line 1 chosen" in text
    assert "line 1 rejected" in text
    assert "line 2" not in text
    assert "2 rows, 4 trajectories, 6 turns; " in text
    assert f"{2 * len(tokens)} tokens, {carrying} carry loss" in text


def test_dmpo_shows_weights_that_fall_with_the_turn(tiny_folder, tmp_path):
    """Gamma 0.7, 2 turns: phi(0) = 1, phi(1) = 0.7 * 0.3 / 0.51 = 0.41."""
    write_pairs(tmp_path / "pairs.jsonl", [PAIR])

    text = shown(tmp_path, tiny_folder, "dmpo")

    assert "[0: p=" in text
    assert "w=1]" in text
    assert "w=0.41]" in text


def test_colours_tell_high_from_low_weights(tiny_folder, tmp_path):
    """With DMPO the chosen side has a highest and a lower turn, and the rejected side a single one: three colours."""
    write_pairs(tmp_path / "pairs.jsonl", [PAIR])
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="truecolor")

    inspect(tmp_path, str(tiny_folder), "dmpo", console)

    rows = console.file.getvalue().split("no loss")[0]
    assert len(set(re.findall(r"48;\d;[\d;]+", rows))) == 3


@pytest.fixture
def run(tmp_path, tiny_folder):
    """A run with one pair whose sides begin alike, tools in its template, and settings of its own."""
    data = {
        "name": "one",
        "output": str(tmp_path),
        "model": {"name": str(tiny_folder), "chat_template": "tools"},
        "environment": {"name": "none"},
        "protocol": {"name": "none"},
        "sft": {"loss": {"name": "sft"}},
        "align": {"loss": {"name": "tlm-dre", "high": 3.0}, "shared_prefix": "mask"},
    }
    run = Run(parse(Recipe, data))
    chosen = played("Action: go", "Action: take it", tools=({"name": "look"},))
    rejected = played("Action: go", "Action: no", tools=({"name": "look"},), reward=0.0)
    write_pairs(run.paths.pairs(), [PreferencePair(chosen, rejected)])
    return run.folder


def test_a_run_is_shown_with_its_own_template_loss_and_prefix(run, tiny_folder):
    """Tools are in the prompt; the turn that both sides share is masked; a turn of low confidence weighs 3."""
    text = shown(run, tiny_folder, None)
    (row,) = [json.loads(line) for line in inspect_json(run, str(tiny_folder))]

    assert "look" in "".join(token["text"] for token in row["chosen"] if token["role"] == "system")
    assert {token["turn"] for token in row["chosen"] if token["loss"]} == {1}
    assert text.count("w=3]") == 2
    assert "[0: " not in text
    assert "w=1]" in shown(run, tiny_folder, "dpo")


def test_a_run_is_shown_with_its_own_credit(run, tiny_folder):
    """DMPO's discount under tlm-dre: the one turn that carries loss is the first of one, and weighs 1."""
    recipe = run / "recipe.yaml"
    text = (
        recipe.read_text().replace("credit: null", "credit: {name: discount}").replace("    high: 3.0\n", "")
    )
    recipe.write_text(text)

    assert shown(run, tiny_folder, None).count("w=1]") == 2


def test_a_run_with_the_template_for_tools_is_audited(run, tiny_folder):
    """`tools` names a template of ours, and no file."""
    found = audit(run, str(tiny_folder))

    assert found["template"]["problems"] == []
    assert found["parts"]["pairs"]["usable"] == 1


def test_an_empty_sampled_action_is_data(tiny_folder, tmp_path):
    """A policy that ends its turn at once sampled one token, which carries loss."""
    file = write(tmp_path / "rows.jsonl", record(text="", token_ids=[2], logprobs=[-1.0]))

    (row,) = [json.loads(line) for line in inspect_json(file, str(tiny_folder))]

    assert [token["text"] for token in row["chosen"] if token["loss"]] == ["<|im_end|>"]


@pytest.fixture
def drew(recipe):
    """A run folder with three episodes that SFT's policy played, of which one is scored."""
    with Run(read_recipe(recipe, [])) as run:
        for file, samples in [(run.paths.drawn("sft"), 3), (run.paths.evaluation("sft"), 1)]:
            with TrajectoryStore(file) as store:
                for sample in range(samples):
                    store.append(played(f"Action: {sample}", sample=sample))
        return run.folder


def test_all_episodes_that_a_policy_drew_are_shown(drew):
    """All three of them, with the run's own model; and --check counts them. An episode alone is no chosen side."""
    shown = CliRunner().invoke(app, ["inspect", str(drew), "--drawn", "sft", "--json"])
    checked = CliRunner().invoke(app, ["inspect", str(drew), "--drawn", "sft", "--check", "--json"])
    printed = CliRunner().invoke(app, ["inspect", str(drew), "--drawn", "sft", "--limit", "1"])

    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    loss = ["".join(token["text"] for token in row["chosen"] if token["loss"]) for row in rows]
    assert loss == [f"Action: {sample}<|im_end|>" for sample in range(3)]
    assert json.loads(checked.stdout)["parts"]["rows"]["rows"] == 3
    assert "3 rows, 3 trajectories, 3 turns" in printed.stdout
    assert "line 1 ─" in printed.stdout
    assert "chosen" not in printed.stdout


def test_the_runs_length_limit_holds_for_drawn_episodes(recipe, drew):
    """As for the data it trains on."""
    assert drawn_by(drew, "sft").max_length == read_recipe(recipe, []).model.max_length


@pytest.mark.parametrize(
    ("policy", "said"),
    [("base", "policy 'base' played no .* Known: sft"), ("../sft", "Known: sft")],
)
def test_a_policy_that_drew_nothing_is_refused(drew, policy, said):
    with pytest.raises(ConfigError, match=said):
        drawn_by(drew, policy)


def test_drawn_episodes_are_those_of_a_run(tmp_path):
    with pytest.raises(ConfigError, match="--drawn names a policy of a run"):
        drawn_by(write(tmp_path / "rows.jsonl", {"messages": say("a", "b")}), "sft")


def test_with_a_loss_the_json_has_the_weight_of_each_loss_token(tiny_folder, tmp_path):
    """They are the numbers of the coloured view: one confidence and one weight for all tokens of a turn."""
    file = tmp_path / "pairs.jsonl"
    write_pairs(file, [PAIR])

    (row,) = [json.loads(line) for line in inspect_json(file, str(tiny_folder), loss_name="tlm-dre")]

    coloured = re.findall(r"\[(\d): p=(\S+) w=([^\s\]]+)", shown(file, tiny_folder, "tlm-dre"))
    tokens = [token for side in row.values() for token in side]
    found = [
        list(
            dict.fromkeys(
                (token["turn"], token["confidence"], token["weight"]) for token in side if token["loss"]
            )
        )
        for side in row.values()
    ]
    told = [(str(turn), f"{p:.2f}", f"{w:.2g}") for side in found for turn, p, w in side]
    assert told == coloured
    assert len(told) == 3
    assert all(("weight" in token) == token["loss"] for token in tokens)
