"""A page of many episodes: each set shows a limited number of them, and the numbers are of all."""

import json
from dataclasses import replace

import pytest

from perturn.analysis.episode_numbers import numbers_of
from perturn.data.store import read_pairs, write_pairs
from perturn.errors import StorageError
from perturn.report import episode_index, summarize, write_report
from perturn.types import PreferencePair


@pytest.fixture
def large(run, make, monkeypatch):
    """A run that evaluated two policies on 40 tasks and has 20 pairs, on a page of four episodes a set.

    SFT solves only the task that comes last in the order of the page.
    """
    monkeypatch.setattr(episode_index, "SHOWN", 4)
    tasks = sorted((f"t{number}" for number in range(40)), key=episode_index._shuffled)
    for name, solved in (("sft", tasks[-1:]), ("tlm-dre", tasks[:2])):
        (run / "evaluation" / f"{name}.jsonl").unlink()
        played = [make.trajectory(task, float(task in solved)) for task in tasks]
        make.put(run / "evaluation" / f"{name}.jsonl", played)
    pairs = [[make.trajectory(f"p{n}", score, text=f"{score}") for score in (1.0, 0.0)] for n in range(20)]
    for side, name in enumerate(("expert", "explore")):
        (run / "trajectories" / f"{name}.jsonl").unlink()
        make.put(run / "trajectories" / f"{name}.jsonl", [pair[side] for pair in pairs])
    write_pairs(run / "pairs.jsonl", [PreferencePair(*pair) for pair in pairs])
    return run


def test_each_set_shows_a_few_episodes_of_equal_tasks_and_both_outcomes(large, make):
    """SFT's only success takes the place of the fourth failure. The page says how many episodes there are."""
    page = make.page_of(large)
    index = page.piece("index")
    rows = list(zip(*(index["columns"][key] for key in ("set", "task", "success")), strict=True))
    shown = [[row[1:] for row in rows if row[0] == number] for number in range(len(index["sets"]))]
    names = [each["name"].rpartition("/")[2] for each in index["sets"]]
    of = dict(zip(names, shown, strict=True))

    assert {name: len(found) for name, found in of.items()} == dict.fromkeys(names, 4)
    assert [each.get("part") for each in index["sets"]] == ["4 of 40", "4 of 40", None, "4 of 20", "4 of 20"]
    assert [{success for _, success in of[name]} for name in ("sft", "tlm-dre")] == [{0, 1}] * 2
    assert len({task for task, _ in of["sft"]} & {task for task, _ in of["tlm-dre"]}) == 3
    assert len(index["pairs"]) == 4
    assert {of["expert"][n][0] for n in range(4)} == {of["explore"][n][0] for n in range(4)}
    assert "The page shows 4 of 40 episodes of evaluation/sft." in page.text
    assert "The page shows 4 of 20 pairs." in page.text
    assert [row["n"] for row in summarize(large)["policies"]] == [4, 40, 40]


def test_the_key_of_an_expert_episode_adds_no_explored_episode(large, make, monkeypatch):
    """Two explored samples of a task, and the second is in its pair: four samples of two tasks, and two of two more."""
    monkeypatch.setattr(episode_index, "most_informative", lambda run: ())
    pairs = read_pairs(large / "pairs.jsonl")
    second = [replace(pair.rejected, sample=1) for pair in pairs]
    (large / "trajectories" / "explore.jsonl").unlink()
    make.put(large / "trajectories" / "explore.jsonl", [*(pair.rejected for pair in pairs), *second])
    write_pairs(
        large / "pairs.jsonl",
        [PreferencePair(pair.chosen, one) for pair, one in zip(pairs, second, strict=True)],
    )

    parts = {each["name"]: each.get("part") for each in make.page_of(large).piece("index")["sets"]}

    assert [part for name, part in parts.items() if name.endswith(("explore", "expert"))] == [
        "6 of 40",
        "4 of 20",
    ]


def test_only_the_reference_values_of_shown_pairs_are_read(large, make):
    """The lines of the other pairs may hold anything."""
    rows = ["nonsense"] * 20
    for index in episode_index._shown_pairs(read_pairs(large / "pairs.jsonl")):
        side = {"ids": [5, 6], "turn": [0, 1], "logprobs": [-0.5, -0.25]}
        rows[index] = json.dumps({"chosen": side, "rejected": side})
    (large / "metrics" / "reference.jsonl").write_text("\n".join(rows) + "\n")

    (_, _, tokens) = make.page_of(large).episode(set="trajectories/explore")

    assert tokens == {"by": "reference", "turns": [[[5], [500]], [[6], [250]]]}


def test_the_summary_is_written_before_the_page(run, monkeypatch):
    """A page that fails costs no number."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("perturn.report.report_page.page", fail)
    with pytest.raises(MemoryError):
        write_report(run)

    assert json.loads((run / "summary.json").read_text()) == summarize(run)


def test_a_summary_reads_no_file_that_only_the_page_shows(run):
    before = summarize(run)
    for name in ("pairs.jsonl", "metrics/reference.jsonl", "trajectories/expert.jsonl"):
        (run / name).write_text("nonsense\n")

    assert summarize(run) == before


def test_a_set_is_cut_at_the_end_of_a_task_and_names_the_size_of_cut_groups(large, make, monkeypatch):
    """Of three samples a task, four shown episodes are one group. Of three other tasks, the side of a pair is shown."""
    monkeypatch.setattr(episode_index, "most_informative", lambda run: ())
    sides = [pair.rejected for pair in read_pairs(large / "pairs.jsonl")]
    (large / "trajectories" / "explore.jsonl").unlink()
    played = [replace(one, sample=sample) for one in sides for sample in range(3)]
    make.put(large / "trajectories" / "explore.jsonl", played)

    index = make.page_of(large).piece("index")

    explored = next(each for each in index["sets"] if each["name"].endswith("explore"))
    assert explored["part"] == "6 of 60"
    assert list(explored["samples"].values()) == [3] * 3


def test_of_a_task_with_very_many_samples_the_first_are_shown(monkeypatch, make):
    monkeypatch.setattr(episode_index, "SHOWN", 4)
    played = [numbers_of(replace(make.trajectory("t", 0.0), sample=sample)) for sample in range(9)]

    assert [one.sample for one in episode_index._chosen(played)] == [0, 1, 2, 3]


def test_a_small_first_task_is_not_shown_alone(monkeypatch, make):
    """Three of the nine samples of the next task fit. Its only success takes the place of the third."""
    monkeypatch.setattr(episode_index, "SHOWN", 4)
    small, large = sorted("ab", key=episode_index._shuffled)
    samples = [replace(make.trajectory(large, float(sample == 8)), sample=sample) for sample in range(9)]
    played = list(map(numbers_of, [*samples, make.trajectory(small, 0.0)]))

    shown = [one.key for one in episode_index._chosen(played)]

    assert shown == [(large, 0), (large, 1), (large, 8), (small, 0)]


def test_a_page_elsewhere_needs_no_writable_run(run, tmp_path, caplog):
    """A folder has the name of the summary, which therefore cannot be written."""
    (run / "summary.json").mkdir()
    with pytest.raises(StorageError, match="summary"):
        write_report(run)

    page = write_report(run, output=tmp_path / "elsewhere.html")

    assert page.is_file()
    (warned,) = (line for line in caplog.messages if "summary.json was not written" in line)
    assert "same command" not in warned
