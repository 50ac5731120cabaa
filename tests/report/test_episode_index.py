"""All episodes are in the page: what each piece holds, and where the numbers of a pair are put."""

from dataclasses import replace

from perturn.analysis.episode_numbers import numbers_of
from perturn.analysis.run_summary import _set_row
from perturn.data.store import write_pairs
from perturn.types import PreferencePair


def test_every_episode_of_every_set_is_there_once(run, make):
    """Three evaluations of 4, 2 explored, 2 expert; the pairs are made of these and add none."""
    index = make.page_of(run).piece("index")

    assert [one["name"] for one in index["sets"]] == [
        "evaluation/tlm-dre", "evaluation/sft", "evaluation/base", "trajectories/explore", "trajectories/expert",
    ]  # fmt: skip
    assert {len(column) for column in index["columns"].values()} == {16}
    assert index["pairs"] == [[0, 14, 12], [0, 15, 13]]
    assert index["compare"] == [["run/evaluation/sft", "run/evaluation/tlm-dre"]]
    assert len(index["prompts"]) == 5


def test_episodes_of_an_unfinished_evaluation_are_shown(run, make):
    """No number counts them, but a user wants to see why the evaluation stopped."""
    make.manifest(run, stages={"evaluate-tlm-dre": {"done": False}})

    index = make.page_of(run).piece("index")

    assert index["sets"][0]["label"] == "tlm-dre, evaluation not finished"
    assert index["columns"]["set"].count(0) == 4


def test_an_episode_has_the_numbers_of_its_pair(run, make):
    """Pair 2, rejected: confidence 0.95, 0.375 and 1, weights 0.2, 1 and 0.2; tokens of the reference."""
    row, body, tokens = make.page_of(run).episode(set="trajectories/explore", task="p1")

    assert (row["score"], row["turns"], row["success"], row["end"]) == (0.25, 3, 0, 1)
    assert body["confidence"] == [0.95, 0.375, 1.0]
    assert body["weight"] == [0.2, 1.0, 0.2]
    assert tokens == {"by": "reference", "turns": [[[5, 6], [500, 0]], [[7], [1]], None]}
    assert make.page_of(run).piece("texts-0") == {"5": "go", "6": " 0", "7": "</b>"}


def test_a_side_that_was_cut_is_an_episode_of_its_own(run, make):
    """Its link names the pair, since the task and sample are those of the whole episode."""
    chosen = make.trajectory("p1", 1.0, policy="expert", text="expert1")
    whole = make.trajectory("p1", 0.25, valid=(True,) * 3, text="explored1")
    write_pairs(run / "pairs.jsonl", [PreferencePair(chosen, replace(whole, turns=whole.turns[:2]))] * 2)

    page = make.page_of(run)

    row, body, _ = page.episode(set="pairs/rejected", sample=1)
    assert (row["task"], len(body["turns"])) == ("p1", 2)
    assert page.piece("index")["pairs"] == [[0, 15, 16], [0, 15, 17]]


def test_a_row_of_a_file_has_no_score(run, make):
    """Nobody played it, so a score of 0 would be made up. In a table of sets it has no average either."""
    said = replace(make.trajectory("p9", 0.0, text="said"), environment="", policy="")
    write_pairs(run / "pairs.jsonl", [PreferencePair(said, replace(said, turns=said.turns[:1]))])

    row, _, _ = make.page_of(run).episode(set="pairs/chosen", task="p9")

    assert row["score"] is None
    assert [_set_row("chosen", [numbers_of(said)])[key] for key in ("score", "success")] == [None, None]
    assert _set_row("chosen", [numbers_of(one) for one in (said, replace(said, policy="sft"))])["score"] == 0


def test_a_failed_episode_scores_0_and_says_why(run, make):
    row, body, _ = make.page_of(run).episode(set="evaluation/sft", task="t4")

    assert (row["score"], row["success"], row["end"]) == (0, 0, 3)
    assert body == {
        "prompt": 0,
        "by": "policy",
        "policy": "sft",
        "error": "FAILED: EngineFailure: go",
        "turns": [],
    }


def test_a_prompt_of_one_episode_is_stored_with_it(run, make):
    """The twelve evaluated episodes share a prompt, which the index holds."""
    page = make.page_of(run)

    _, body, _ = page.episode(set="trajectories/explore", task="p1")
    assert body["prompts"] == {str(body["prompt"]): [["system", "Play. explored1"]]}
    assert page.piece("index")["prompts"] == [[["system", "Play. go"]], *[None] * 4]
