"""Exploration beside training: no token is older than allowed, and each says its version."""

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import NO_TURN, Renderer
from perturn.data.group_account import read_credits
from perturn.data.store import read_trajectories
from perturn.data.token_lag import lag_figures, lags, stale_keys
from perturn.errors import ConfigError
from perturn.policy.logprobs import action_logprobs
from perturn.policy.models import load_model
from perturn.policy.packing import lay_out
from perturn.run.stages.staleness_checks import check_staleness
from perturn.types import Action, Status, Task, Trajectory, Turn
from support.credited import EPISODES
from support.loop import start

from .kills import Forks
from .online import GROUPS, UNDECIDED, recipe_of

WORDS = [*GROUPS, UNDECIDED, "iterations=4", "evaluate.every=1", "evaluate.tasks.n=2", "credit.name=rloo"]
"""All policies stay, as all are scored."""
LORA = (
    "align.lora={rank: 2, target_modules: [q_proj, v_proj, down_proj]}",
    "align.minibatches=null",
    "align.learning_rate=3.0e-2",
)


@pytest.fixture(
    scope="module",
    params=[
        (1, ()),
        pytest.param((2, ()), marks=pytest.mark.slow),
        pytest.param((1, LORA), marks=pytest.mark.slow),
    ],
    ids=["1", "2", "1 with adapters"],
)
def stale(request, run_once):
    """Four iterations, and how old a token may be."""
    most, words = request.param
    return most, run_once(f"stale-{most}-{len(words)}", *WORDS, *words, f"staleness={most}")


def explored(run, number):
    """The episodes of an iteration."""
    return list(read_trajectories(run / f"trajectories/explore-{number:03d}.jsonl"))


def counts_of(run):
    """Counts by stage."""
    return {
        name: note["counts"]
        for name, note in json.loads((run / "manifest.json").read_text())["stages"].items()
    }


def test_no_token_is_older_than_allowed(stale):
    """Each iteration is explored before the one before is trained, and has all of its episodes."""
    most, run = stale
    found = {
        number: [lag for one in explored(run, number) for lag in lags(one, number - 1)]
        for number in range(1, 5)
    }

    assert set(found[1]) == {0}
    for number in (2, 3, 4):
        assert 0 < max(found[number]) <= most
        assert min(found[number]) >= 0
        assert len(explored(run, number)) == 12
        counts = counts_of(run)[f"credit-{number:03d}"]
        assert counts["asked"] == 12
        assert counts["stale"] == 0
        assert counts["lag_most"] <= most


def test_each_token_has_its_logprob_under_the_policy_of_its_version(stale):
    """Within 1e-3 nats in float32, by the checkpoints that the run has saved."""
    _, run = stale
    names = ["sft", *(f"ppo-clip-{number:03d}" for number in range(1, 4))]
    folders = [str(run / "checkpoints" / name) for name in names]
    renderer = Renderer(load_tokenizer(folders[0]))
    models = [load_model(folder) for folder in folders]

    parted = 0.0
    for one in (one for number in range(1, 5) for one in explored(run, number)):
        encoded = renderer.encode(one)
        with torch.no_grad():
            scored = torch.stack([action_logprobs(model, lay_out([encoded])) for model in models])
        versions = torch.tensor([each for turn in one.turns for each in turn.action.versions])
        recorded = torch.tensor([each for turn in one.turns for each in turn.action.logprobs])
        assert sum(turn != NO_TURN for turn in encoded.turn) == len(versions)
        assert_close(recorded, scored.gather(0, versions[None])[0], atol=1e-3, rtol=0)
        parted = max(parted, float((scored[0] - scored[-1]).abs().max()))
    assert parted > 1e-2


def begin_waiting(place, name, *words):
    """Start a run whose worlds wait, once the first iteration is explored, until the first trained policy plays."""
    recipe_of(place, *words)
    world = place / "perturn_letters.py"
    waits = WAITS.format(run=place / "runs" / name)
    world.write_text(
        world.read_text().replace("        self.turns += 1\n", f"{waits}        self.turns += 1\n")
    )
    return start(place, name, *words, recipe="online.yaml")


WAITS = """
        import pathlib, time
        run = pathlib.Path("{run}")
        first = run / "trajectories/explore-001.jsonl"
        while first.is_file() and first.read_bytes().count(b"\\n") == 12 and not [*run.glob("evaluation/ppo*001*")]:
            time.sleep(0.05)
"""


def test_the_policy_goes_over_while_episodes_are_played(run_once):
    """Episodes of the second iteration begin with the first policy and end with a newer policy."""
    run = run_once("crossing", *WORDS, "iterations=2", "staleness=1", begin=begin_waiting)
    versions = [[turn.action.versions for turn in one.turns] for one in explored(run, 2)]

    crossing = [each for each in versions if set(each[0]) == {0} and set(each[-1]) == {1}]
    assert len(crossing) > 0
    assert counts_of(run)["credit-002"]["lag_most"] == 1


def turn(*versions):
    return Turn((), Action("a", (1,) * len(versions), (-1.0,) * len(versions), versions=versions))


def test_a_group_with_a_token_that_is_too_old_is_counted_as_stale():
    """Also the episodes of the group that are young enough; failed episodes stay failed."""
    old = [
        replace(one, turns=(turn(0, 1),) * len(one.turns)) for one in EPISODES if one.task == EPISODES[0].task
    ]
    groups = [old, [replace(one, task=Task("young"), turns=(turn(1),) * len(one.turns)) for one in old]]

    keys = stale_keys(groups, 2, 1)
    assert keys == {one.key for one in old}
    assert stale_keys(groups, 2, 2) == set()
    assert lag_figures(groups[0][:1], 2) == {"lag_most": 2, "lag_mean": 1.5}


def test_turns_that_another_iteration_played_do_not_count():
    """They carry no loss in this one; tokens without a version have none."""
    one = Trajectory(Task("t"), (turn(0), turn(3, 4), Turn((), Action("a", (1,)))), taken_over=1, origin=0)

    assert lags(one, 5) == [2, 1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["iterations=1"], "there is no next iteration to explore meanwhile; set iterations > 1"),
        (["rows={name: group-pairs}", "align.loss={name: dpo}", "credit=null"], "take rows.name=groups"),
        (["explore.name=branches", "credit.name=spo"], "take explore.name=rollouts"),
        (["credit.name=progress-advantage"], "reads the policy that acted, of which there are several"),
        (
            ["engine={name: api, base_url: 'http://localhost:1/v1'}"],
            "cannot go over to other weights while it answers",
        ),
        (
            ["engine={name: vllm, sleep: true}"],
            "engine.sleep is set: the engine answers while a policy is trained",
        ),
        (["deterministic=true"], "deterministic is set: when the policy changes depends on timing"),
        (["evaluate.select={name: likelihood}"], "evaluate.select is set"),
    ],
)
def test_what_needs_one_policy_is_refused(place, words, says):
    """Before work, with what to set."""
    with pytest.raises(ConfigError, match=says):
        check_staleness(recipe_of(place, *GROUPS, "staleness=1", *words))


@pytest.mark.slow
def test_a_killed_run_goes_on_and_counts_the_same_episodes(place):
    """Killed while a later iteration is explored ahead; each episode is in its file once, and in one bin."""
    recipe_of(place)
    forks = Forks(place)
    words = ["online.yaml", *WORDS, "staleness=1"]
    forks.run("again", *words, kill_at="trajectories/explore-002.jsonl")
    forks.run("again", *words)
    run = place / "runs" / "again"

    for number in range(1, 5):
        keys = [one.key for one in explored(run, number)]
        assert len(keys) == len(set(keys)) == 12
        assert sorted(row.key for row in read_credits(run / f"credits/rloo-{number:03d}.jsonl")) == sorted(
            keys
        )
        assert max((lag for one in explored(run, number) for lag in lags(one, number - 1)), default=0) <= 1


@pytest.mark.slow
def test_staleness_0_gives_the_bytes_of_a_run_without_the_setting(run_once):
    """Policies, episodes and weights of turns of two iterations."""
    words = [*GROUPS, UNDECIDED, "iterations=2", "evaluate=null", "credit.name=rloo", "deterministic=true"]
    absent, zero = run_once("absent", *words), run_once("zero", *words, "staleness=0")

    def contents(run):
        files = [
            *run.glob("trajectories/*-*.jsonl"),
            *run.glob("credits/*.jsonl"),
            *run.rglob("*.safetensors"),
        ]
        found = {file.relative_to(run).as_posix(): file.read_bytes() for file in files}
        expert = (run / "trajectories/expert.jsonl").read_bytes()
        return found | {"expert": sorted(expert.splitlines())}  # stored in the order in which they end

    found = contents(absent)
    first, last = (found[f"checkpoints/{name}/model.safetensors"] for name in ("sft", "ppo-clip-002"))
    assert {"trajectories/explore-002.jsonl", "credits/rloo-002.jsonl"} < found.keys()
    assert first != last
    assert found == contents(zero)


@pytest.mark.slow
def test_windows_are_resumed_while_the_policy_trains(run_once):
    """One turn a window: each unfinished episode resumes once, no token is too old, and each episode is in one bin."""
    windows = ("evaluate=null", "credit.name=turn-gae", "explore.name=window", "explore.turns=1")
    run = run_once("stale-windows", *WORDS[:-4], *windows, "iterations=3", "staleness=1")
    left: list[tuple[str, int]] = []
    resumed = 0
    for number in (1, 2, 3):
        found = explored(run, number)
        counts = counts_of(run)[f"credit-{number:03d}"]
        assert sorted((one.task.id, one.origin) for one in found if one.origin is not None) == sorted(left)
        assert max(lag for one in found for lag in lags(one, number - 1)) == min(number - 1, 1)
        assert len(found) == 12 + len(left) == counts["asked"]
        bins = [row.bin for row in read_credits(run / f"credits/turn-gae-{number:03d}.jsonl")]
        assert sum(counts[name] for name in set(bins)) == len(bins) == len(found)
        assert counts["stale"] == 0
        left = [one.key for one in found if one.status is Status.UNFINISHED]
        resumed += sum(one.origin is not None and one.status is Status.COMPLETED for one in found)
    assert resumed > 0
