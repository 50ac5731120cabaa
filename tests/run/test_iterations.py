"""Many iterations are the same loop: each explores with, and is aligned from, the policy of the one before."""

import time

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.analysis.run_contents import read_run
from perturn.audit import model_of
from perturn.data.store import read_pairs, read_trajectories
from perturn.report import summarize, write_report
from perturn.run.execute import open_run
from perturn.watch import Watcher
from support.loop import finish, kill, start

WORDS = ["iterations=2", "align.loss.name=dpo", "align.epochs=1", "sft.epochs=1"]
WORDS += ["explore.concurrency=1", "worlds.processes=0", "engine={name: local, speculate: false}"]


@pytest.fixture(scope="module")
def twice(run_once):
    """ETO's loop, two times, that nothing interrupted."""
    return run_once("twice", *WORDS, begin=start)


def test_each_iteration_begins_with_the_policy_of_the_one_before(twice):
    """Explored by SFT, then by the policy that was aligned on it; pairs put the expert before those failures."""
    first, second = (list(read_trajectories(twice / f"trajectories/explore-00{n}.jsonl")) for n in (1, 2))

    assert {one.policy.partition("@")[0] for one in first} == {"sft"}
    assert {one.policy.partition("@")[0] for one in second} == {"dpo-001"}
    assert {one.seed for one in first}.isdisjoint(one.seed for one in second)
    for pair in read_pairs(twice / "pairs-002.jsonl"):
        assert (pair.chosen.policy, pair.rejected.policy.partition("@")[0]) == ("expert", "dpo-001")


def test_every_policy_is_scored_and_the_report_shows_the_last_iteration(twice):
    """Four policies in their order; the page says whose episodes it shows."""
    names = [row["name"] for row in summarize(twice)["policies"]]
    found = read_run(twice)

    assert names == ["base", "sft", "dpo-001", "dpo-002"]
    assert found.pairs == read_pairs(twice / "pairs-002.jsonl")
    assert {one.policy.partition("@")[0] for one in found.explored} == {"dpo-001"}
    assert "are from iteration 2" in found.notes[0]
    assert "are from iteration 2" in write_report(twice, output=twice.parent / "page.html").read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_second_iteration_ends_as_the_other_did(place, twice):
    """While it explores and while it aligns; one episode at a time and no guesses, so rounding is the same too."""
    for file in ("trajectories/explore-002.jsonl", "metrics/align-002.jsonl"):
        killed = start(place, "killed", *WORDS)
        deadline = time.monotonic() + 100
        while not (place / "runs/killed" / file).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(killed)
    finish(start(place, "killed", *WORDS))

    assert (place / "runs/killed/pairs-002.jsonl").read_bytes() == (twice / "pairs-002.jsonl").read_bytes()
    assert_close(
        *(load_file(run / "checkpoints/dpo-002/model.safetensors") for run in (twice, place / "runs/killed")),
        rtol=0,
        atol=0,
    )


def test_pairs_are_inspected_with_the_reference_of_their_own_iteration(twice):
    """The weights of the second iteration's pairs came from the policy of the first."""
    assert model_of(twice, None) == str(twice / "checkpoints" / "dpo-001")


def test_watch_follows_the_newest_iteration(twice):
    """A finished run, whose last numbers are those of its last alignment."""
    state = Watcher(twice).look()

    assert state.is_well
    assert list(state.metrics) == ["sft", "align-002"]


def test_a_finished_run_has_nothing_left_to_do(place, twice, monkeypatch):
    """Every stage of both iterations is done."""
    monkeypatch.chdir(place)
    with open_run(twice) as run:
        assert all(one["done"] for one in run.manifest["stages"].values())
        assert len(run.manifest["stages"]) == 4 + 2 * 4
