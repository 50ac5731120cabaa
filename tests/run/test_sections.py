"""Recipes of some sections: what is not there is not done, and nothing that it would need is asked for."""

import json

import pytest

from perturn.data.store import read_pairs, read_trajectories
from perturn.errors import ConfigError, DataError
from perturn.report import write_report
from perturn.run.execute import open_run, run_stages

SAY = [{"role": "user", "content": "Find the box."}]


def answer(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def start(tmp_path, tiny_folder):
    """Write a recipe of some sections for the tiny model, and open it."""

    def write(sections):
        file = tmp_path / "recipe.yaml"
        model = {"name": str(tiny_folder), "dtype": "float32"}
        data = {"name": "run", "output": str(tmp_path / "runs"), "model": model, **sections}
        file.write_text(json.dumps(data))
        return open_run(file)

    return write


def lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_pairs_of_a_file_are_aligned_without_an_environment(start, tmp_path):
    """TRL's rows; the model is the policy already and its own reference."""
    pairs = [{"prompt": SAY, "chosen": answer(f"go {n}"), "rejected": answer(f"wait {n}")} for n in range(3)]
    align = {"loss": {"name": "tlm-dre"}, "batch_size": 2}
    run = start({"align": align, "rows": {"name": "file", "path": lines(tmp_path / "rows.jsonl", *pairs)}})

    run_stages(run)

    assert list(run.manifest["stages"]) == ["pair", "align"]
    assert [pair.chosen.turns[0].action.text for pair in read_pairs(run.paths.pairs())] == [
        "go 0",
        "go 1",
        "go 2",
    ]
    assert (run.paths.checkpoint("tlm-dre") / "config.json").is_file()
    assert len(run.paths.metrics("confidence").read_text().splitlines()) == 3
    assert not run.paths.tasks.exists()
    run.close()
    with open_run(run.folder) as again:
        assert again.is_done("align")


def test_a_run_without_an_environment_is_opened_again(start, tmp_path):
    """By its recipe and by its folder; what of an environment may differ is nothing where there is none."""
    pairs = [{"prompt": SAY, "chosen": answer("go"), "rejected": answer("wait")}]
    sections = {
        "align": {"loss": {"name": "dpo"}},
        "rows": {"name": "file", "path": lines(tmp_path / "rows.jsonl", *pairs)},
    }
    start(sections).close()

    for source in (tmp_path / "recipe.yaml", tmp_path / "runs" / "run"):
        with open_run(source) as run:
            assert run.recipe.environment is None


def test_expert_episodes_of_a_file_are_taught_without_an_environment(start, tmp_path):
    """All rows are taught, as the successes of an expert that they are."""
    rows = [{"messages": SAY + answer(f"go {n}")} for n in range(3)]
    expert = {"file": lines(tmp_path / "rows.jsonl", *rows)}
    run = start({"sft": {"loss": {"name": "sft"}}, "expert": expert})

    run_stages(run)

    assert list(run.manifest["stages"]) == ["expert", "sft"]
    assert run.manifest["stages"]["sft"]["counts"]["examples"] == 3
    assert all(one.success for one in read_trajectories(run.paths.trajectories("expert")))


def test_a_credit_of_the_recipe_writes_the_weights_that_are_recorded(start, tmp_path):
    """DMPO's discount under tlm-dre, two turns: 1 and 0.7 * 0.3 / 0.51 = 0.411765."""
    more = [{"role": "user", "content": "And now?"}]
    rows = [{"prompt": SAY, "chosen": answer("go") + more + answer("take"), "rejected": answer("wait")}]
    align = {"loss": {"name": "tlm-dre"}}
    pair = {"name": "file", "path": lines(tmp_path / "rows.jsonl", *rows)}
    run = start({"align": align, "rows": pair, "credit": {"name": "discount"}})

    run_stages(run)
    (row,) = map(json.loads, run.paths.metrics("confidence").read_text().splitlines())

    assert row["chosen"]["weight"] == pytest.approx([1.0, 0.411765], abs=1e-6)
    assert row["rejected"]["weight"] == [1.0]


def test_turns_without_loss_are_recorded_without_a_weight(start, tmp_path, caplog):
    """Of a row with a marked and an empty answer, and a key that nothing reads; the report is made."""
    more = [{"role": "user", "content": "And now?"}]
    bad, empty = [answer("drop it")[0] | {"weight": 0}], answer("")
    chosen = bad + more + answer("take") + more + empty + more + answer("leave")
    rows = [{"prompt": SAY, "chosen": chosen, "rejected": answer("wait"), "plan": "x"}]
    pair = {"name": "file", "path": lines(tmp_path / "rows.jsonl", *rows)}
    run = start({"align": {"loss": {"name": "dmpo"}}, "rows": pair})

    run_stages(run)
    (row,) = map(json.loads, run.paths.metrics("confidence").read_text().splitlines())

    assert row["chosen"]["turn"] == [1, 3]
    assert row["chosen"]["weight"] == pytest.approx([1.0, 0.411765], abs=1e-6)
    assert [one.trained for one in read_pairs(run.paths.pairs())[0].chosen.turns] == [False, True, True, True]
    assert [record.message for record in caplog.records if "nothing reads" in record.message] == [
        f"{tmp_path / 'rows.jsonl'}: keys that nothing reads: column plan (1 rows)"
    ]
    run.close()
    write_report(run.folder)


@pytest.mark.parametrize(
    ("sections", "row", "says"),
    [
        ("rows", {"messages": SAY + answer("go")}, "rows.jsonl:1: expected chosen and rejected"),
        (
            "expert",
            {"prompt": SAY, "chosen": answer("a"), "rejected": answer("b")},
            "rows.jsonl:1: expected one conv",
        ),
    ],
)
def test_rows_of_the_wrong_kind_are_refused_by_their_number(start, tmp_path, sections, row, says):
    source = lines(tmp_path / "rows.jsonl", row)
    file = {sections: {"name": "file", "path": source} if sections == "rows" else {"file": source}}
    stage = {"align": {"loss": {"name": "dpo"}}} if sections == "rows" else {"sft": {"loss": {"name": "sft"}}}

    with pytest.raises(DataError, match=says):
        start({**stage, **file})
    assert not (tmp_path / "runs").exists()


def test_rows_that_the_template_rejects_are_named_by_their_lines_before_work(start, tmp_path):
    """All of them. Training would name them after the stages before it."""
    thinks = [answer("go")[0] | {"reasoning_content": "It is dark."}]
    rows = [{"messages": SAY + said} for said in (answer("go"), thinks, answer("on"), thinks)]
    file = lines(tmp_path / "rows.jsonl", *rows)

    with pytest.raises(
        DataError, match=r"rows.jsonl: line 2, 4: .*'It is dark\.'\), which the chat template does"
    ):
        start({"sft": {"loss": {"name": "sft"}}, "expert": {"file": file}})
    pair = {"prompt": SAY, "chosen": thinks, "rejected": answer("wait")}
    file = lines(tmp_path / "rows.jsonl", {**pair, "chosen": answer("go")}, pair)
    with pytest.raises(DataError, match=r"rows.jsonl:2: an assistant message has its thought as a field"):
        start({"align": {"loss": {"name": "dpo"}}, "rows": {"name": "file", "path": file}})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("section", "stage", "loss"), [("rows", "align", "dpo"), ("expert", "sft", "sft")])
def test_a_file_without_rows_is_refused_before_work(start, tmp_path, section, stage, loss):
    """Else the stage is done with nothing, and rows that come later are never read."""
    source = lines(tmp_path / "rows.jsonl")
    file = {section: {"name": "file", "path": source} if section == "rows" else {"file": source}}

    with pytest.raises(DataError, match=r"rows.jsonl holds no row; give rows with"):
        start({stage: {"loss": {"name": loss}}, **file})
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there_is_refused_before_work(start, tmp_path):
    with pytest.raises(ConfigError, match=r"rows.path: .*none.jsonl cannot be read: there is no such file"):
        start(
            {
                "align": {"loss": {"name": "dpo"}},
                "rows": {"name": "file", "path": str(tmp_path / "none.jsonl")},
            }
        )
    assert not (tmp_path / "runs").exists()
