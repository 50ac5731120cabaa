"""Many iterations on the policy's own episodes: groups that a credit weighs, and one optimizer all the way."""

import io
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.analysis.run_contents import read_run
from perturn.audit import inspect, model_of
from perturn.config.row_maker_settings import Limit, RowInputs
from perturn.config.sections import ModelSettings
from perturn.config.stages import stages
from perturn.credit import CREDITS
from perturn.data.group_account import read_credits, write_credits
from perturn.data.run_folder import Run, resolve_recipe
from perturn.data.run_paths import OPTIMIZER
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.group import groups_of
from perturn.rows.pairing import parting
from perturn.run.execute import check, open_run, run_stages
from perturn.run.export_run import export_policy, export_rows, model_card
from perturn.run.session import make_renderer
from perturn.run.stages import group_stage
from perturn.run.stages.credit_stage import credit_groups
from perturn.run.stages.group_stage import LengthLimit, read_groups
from perturn.run.verify_run import verify
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn

from .online import GROUPS, UNDECIDED, recipe_of


@pytest.fixture(scope="module")
def online(run_once):
    """Three iterations of policy gradient."""
    return run_once("online", *GROUPS, UNDECIDED)


def steps(run, iteration):
    """What each optimizer step of an iteration logged."""
    return [
        json.loads(line) for line in (run / f"metrics/align-00{iteration}.jsonl").read_text().splitlines()
    ]


def test_every_episode_that_was_asked_for_is_in_one_bin(online):
    """3 tasks x 4 samples an iteration; the file of the credit has a row for each, and the manifest the counts."""
    stages = json.loads((online / "manifest.json").read_text())["stages"]
    for iteration in (1, 2, 3):
        rows = read_credits(online / f"credits/anchor-rloo-00{iteration}.jsonl")
        counts = stages[f"credit-00{iteration}"]["counts"]

        assert len(rows) == counts["asked"] == 12
        assert sum(counts[name] for name in ("trained", "no_spread", "failed", "filtered")) == 12
        # Those without spread take part in the KL to the reference.
        assert stages[f"align-00{iteration}"]["counts"]["examples"] == counts["trained"] + counts["no_spread"]


def test_the_weights_are_those_of_the_credit(online):
    """The same numbers as a call of the credit on the stored groups."""
    groups = groups_of(read_trajectories(online / "trajectories/explore-002.jsonl"))
    expected = {
        one.key: weight.tolist()
        for group in groups
        for one, weight in zip(group, CREDITS["anchor-rloo"]()(group), strict=True)
    }

    found = {row.key: list(row.weight) for row in read_credits(online / "credits/anchor-rloo-002.jsonl")}
    assert found == expected
    assert any(weight for weights in found.values() for weight in weights)


def test_the_schedule_and_the_optimizer_go_on(online):
    """Six steps of one linear schedule; Adam has counted all of them."""
    rates = [entry["learning_rate"] for iteration in (1, 2, 3) for entry in steps(online, iteration)]
    state = torch.load(online / "checkpoints/ppo-clip-003/optimizer.pt", weights_only=True)["state"]

    assert rates == pytest.approx([0.003 * left / 6 for left in (6, 5, 4, 3, 2, 1)])
    assert {int(one["step"]) for one in state.values()} == {6}


def test_the_first_step_of_an_iteration_is_on_policy(online):
    """The engine has the weights of the iteration before, so the ratio begins at 1."""
    for iteration in (1, 2, 3):
        first = steps(online, iteration)[0]
        assert first["ratio"] == pytest.approx(1, abs=1e-4)
        assert first["behavior_kl"] == pytest.approx(0, abs=1e-6)


def test_tasks_differ_from_iteration_to_iteration(online):
    """3 of 16 tasks each: five iterations share none; each begins with the policy before."""
    played = [list(read_trajectories(online / f"trajectories/explore-00{n}.jsonl")) for n in (1, 2, 3)]
    tasks = [{one.task.id for one in episodes} for episodes in played]

    assert all(one.isdisjoint(other) for one, other in pairwise(tasks))
    assert [{one.policy.partition("@")[0] for one in episodes} for episodes in played] == [
        {"sft"},
        {"ppo-clip-001"},
        {"ppo-clip-002"},
    ]


def test_policies_that_nothing_needs_are_deleted(online):
    """The second is scored, the third is the newest; only that has its optimizer. The run opens again."""
    kept = {folder.name for folder in (online / "checkpoints").iterdir()}

    assert kept == {"sft", "ppo-clip-002", "ppo-clip-003"}
    assert not (online / "checkpoints/ppo-clip-002/optimizer.pt").exists()
    assert not verify(online).damaged


def test_what_a_kill_left_of_earlier_policies_goes_with_the_next_call(online, tmp_path, monkeypatch):
    """As if it had come after the last training was done, and before the policy before it was let go."""
    copy = tmp_path / "online"
    shutil.copytree(online, copy)
    shutil.copytree(copy / "checkpoints/ppo-clip-003", copy / "checkpoints/ppo-clip-001")
    monkeypatch.chdir(online.parent.parent)
    monkeypatch.syspath_prepend(online.parent.parent)

    with open_run(copy) as run:
        run_stages(run)

    assert {one.name for one in (copy / "checkpoints").iterdir()} == {"sft", "ppo-clip-002", "ppo-clip-003"}


@pytest.mark.parametrize("name", ["trajectories/explore-002.jsonl", "credits/anchor-rloo-002.jsonl"])
def test_what_starts_from_a_policy_that_was_deleted_cannot_be_made_again(online, tmp_path, name):
    """Damage in the second iteration, whose policy was not kept for a second training: nothing is to be removed."""
    copy = tmp_path / "online"
    shutil.copytree(online, copy)
    file = copy / name
    file.write_bytes(file.read_bytes()[:-2] + b" }")

    (remedy,) = verify(copy).remedies

    assert "was not kept" in remedy
    assert "rm -r" not in remedy


def test_a_removed_stage_is_not_made_again_without_the_optimizer_that_it_went_on_with(
    online, tmp_path, monkeypatch
):
    """Nothing is to be removed, and who removed all of it by hand is told, too: another optimizer would train."""
    copy = tmp_path / "online"
    shutil.copytree(online, copy)
    monkeypatch.chdir(online.parent.parent)
    monkeypatch.syspath_prepend(online.parent.parent)
    (copy / "credits/anchor-rloo-003.jsonl").unlink()

    with pytest.raises(RunError) as caught:
        open_run(copy)
    assert "ppo-clip-002/optimizer.pt was not kept" in str(caught.value)
    assert "rm -r" not in str(caught.value)

    shutil.rmtree(copy / "checkpoints/ppo-clip-003")
    for name in ("metrics/align-003.jsonl", "evaluation/ppo-clip-003.jsonl"):
        (copy / name).unlink()
    with (
        open_run(copy) as run,
        pytest.raises(RunError, match=r"align-003 would go on with .*optimizer.pt, which was not kept"),
    ):
        run_stages(run)


def test_the_episodes_of_all_iterations_are_exported(online, tmp_path):
    counts = export_rows(online, "trl", tmp_path / "rows")

    files = sorted((online / "trajectories").glob("explore-*.jsonl"))
    assert len(files) == 3
    assert counts["explored"] == sum(len(list(read_trajectories(file))) for file in files) == 36


def test_the_card_of_a_policy_names_the_run_that_trained_it_first(online, tmp_path, monkeypatch):
    """A path of this machine says nothing to others, and `base` in the scores is the policy of the first run."""
    monkeypatch.chdir(online.parent.parent)
    monkeypatch.syspath_prepend(online.parent.parent)
    recipe = replace(resolve_recipe(online), model=ModelSettings(str(online / "checkpoints/ppo-clip-003")))

    card = model_card(read_run(online), recipe, "ppo-clip-003")
    assert "`tiny`, trained in run `online` to `ppo-clip-003`, post-trained turn by turn" in card
    assert "`base` is `ppo-clip-003` of run `online`." in card
    assert "[[" not in card


def test_a_policy_is_exported_without_its_optimizer(online, tmp_path):
    """The newest one has an optimizer beside it, which is nobody's business but the run's."""
    export_policy(online, tmp_path / "hub")

    names = {file.name for file in (tmp_path / "hub").iterdir()}
    assert "model.safetensors" in names
    assert names.isdisjoint(OPTIMIZER)


def test_inspect_shows_the_weights_that_were_written_down(online):
    """Rows are the newest groups, the model is the reference, and each turn has its number of the credit's file."""
    rows = {row.key: row for row in read_credits(online / "credits/anchor-rloo-003.jsonl")}
    played = list(read_trajectories(online / "trajectories/explore-003.jsonl"))
    console = Console(record=True, width=500, file=io.StringIO())

    inspect(online, model_of(online, None), None, console, limit=len(played))

    assert model_of(online, None) == str(online / "checkpoints" / "sft")
    shown = re.findall(r"w=([-\d.e]+)\]", console.export_text())
    assert shown == [f"{weight:.2g}" for one in played for weight in rows[one.key].weight]


@pytest.mark.slow
def test_the_moving_average_is_one(place, run_once):
    """average_2 = 0.5 average_1 + 0.5 policy_2, and average_1 is of the policy that the loop began with."""
    words = ["evaluate.every=1", "align.reference=average", "align.reference_decay=0.5", "iterations=2"]
    run_once("average", UNDECIDED, *words)
    policies = place / "runs/average/checkpoints"
    sft, first, second, average = (
        load_file(policies / name / "model.safetensors")
        for name in ("sft", "dpo-001", "dpo-002", "average-002")
    )

    for name, tensor in average.items():
        assert_close(tensor, 0.25 * sft[name] + 0.25 * first[name] + 0.5 * second[name])
    assert {folder.name for folder in policies.iterdir()} == {"sft", "dpo-001", "dpo-002", "average-002"}


@pytest.mark.slow
def test_an_iteration_without_anything_to_learn_leaves_the_policy_as_it_is(place, run_once):
    """No gap is larger than 2; the loop goes on."""
    run_once("idle", "rows.threshold=2", "iterations=2")
    policies = place / "runs/idle/checkpoints"

    assert_close(
        *(load_file(policies / name / "model.safetensors") for name in ("sft", "dpo-002")), rtol=0, atol=0
    )


def test_an_episode_whose_first_turn_does_not_fit_is_known_before_training(place, monkeypatch):
    """One that grows too long later is only cut there; nothing but the length decides."""
    monkeypatch.chdir(place)
    heard = [{"role": "user", "content": text} for text in ("Begin.", "a long story " * 50)]
    short, long = (
        Turn((message,), Action("Action: left", token_ids=(1, 2, 3), logprobs=(-1.0,) * 3))
        for message in heard
    )
    episodes = [
        Trajectory(Task(name), turns)
        for name, turns in (("short", (short,)), ("later", (short, long)), ("long", (long,)), ("none", ()))
    ]

    loaded = []
    monkeypatch.setattr(
        group_stage, "make_renderer", lambda *given: loaded.append(given) or make_renderer(*given)
    )
    limit = LengthLimit(recipe_of(place, "model.max_length=100"))
    assert limit.too_long(episodes) == {("long", 0)}
    assert [limit.whole(one) for one in episodes[:3]] == [True, False, False]
    assert len(loaded) == 1
    no_tokens = Trajectory(
        Task("broken"), (replace(short, action=Action("a", tool_calls=({"function": 3},))),)
    )
    assert limit.too_long([no_tokens]) == set()  # training says why it has no tokens
    assert LengthLimit(recipe_of(place)).too_long(episodes) == set()
    served = recipe_of(place, "engine.name=api", "model.name=on-a-server", "model.max_length=1")
    assert LengthLimit(served).too_long(episodes) == set()


def test_what_has_no_spread_and_does_not_fit_takes_no_part_in_kl(place, monkeypatch):
    """A branch of which no turn of its own fits, and an episode whose first does not; all scores are 0."""
    monkeypatch.chdir(place)
    heard = [{"role": "user", "content": text} for text in ("Begin.", "a long story " * 50)]
    short, long = (
        Turn((message,), Action("Action: left", token_ids=(1, 2, 3), logprobs=(-1.0,) * 3))
        for message in heard
    )
    episodes = [
        Trajectory(Task("t"), (short, long)),
        Trajectory(Task("t"), (long,), sample=1),
        Trajectory(Task("t"), (short, long), sample=2, origin=0, taken_over=1),
    ]
    words = [
        *GROUPS,
        "credit.name=portool",
        "explore.name=branches",
        "explore.every=1",
        "explore.branches=1",
        "model.max_length=100",
    ]
    recipe = recipe_of(place, *words, "name=unfitting")
    with Run(recipe) as run:
        for name, found in (("explore-001", episodes[:2]), ("branch-001", episodes[2:])):
            file = run.paths.trajectories(name)
            with run.stage(name, file), TrajectoryStore(file) as store:
                for one in found:
                    store.append(one)
        rows = credit_groups(episodes, CREDITS["portool"](), too_long=LengthLimit(recipe).too_long(episodes))
        write_credits(run.paths.credit("portool", "-001"), rows)
        stage = next(stage for stage in stages(recipe) if stage.name == "align-001")

        trained, asked = read_groups(run, stage)

    assert {row.bin for row in rows} == {"no_spread"}
    assert [one.trajectory.key for one in trained] == [("t", 0)]
    assert asked == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rows={name: groups}"], "align.loss.name must be a loss on groups .*ppo-clip.*, got 'dpo'"),
        (["align.loss={name: ppo-clip}"], "align.loss.name must be a loss on pairs .*, got 'ppo-clip'"),
        (["explore.per_iteration=17"], "explore.per_iteration must be at most the 16 tasks"),
        (["align.lora={}", "launch={processes: 2, sharding: fsdp2}"], "align.lora: adapters cannot go on"),
        (
            [*GROUPS, "explore.sampling.temperature=0.4"],
            "explore.sampling must have temperature 1 and top_p 1",
        ),
        ([*GROUPS, "explore.sampling.top_p=0.9"], "explore.sampling must have temperature 1 and top_p 1"),
        (
            [*GROUPS, "align.minibatches=13"],
            "align.minibatches must be at most the 12 episodes of an iteration",
        ),
        (["credit.name=turn-gae"], "credit 'turn-gae' needs values, which training does not compute"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_before_work(place, monkeypatch, words, message):
    """In one line that says what to change."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with pytest.raises(ConfigError, match=message):
        check(recipe_of(place, *words))


def test_pairs_that_part_behind_the_length_limit_are_known_before_training(place, monkeypatch):
    """Training would refuse sides that are the same tokens; where a first turn does not fit, it says so itself."""
    monkeypatch.chdir(place)
    heard = [({"role": "user", "content": text},) for text in ("Begin.", "a long story " * 50, "Go on.")]
    left, right = (Action(f"Action: {text}") for text in ("left", "right"))

    def pair(one, other):
        sides = (
            Trajectory(Task("t"), tuple(Turn(*each) for each in zip(heard, actions, strict=False)))
            for actions in (one, other)
        )
        return PreferencePair(*sides)

    pairs = [
        pair([left, left], [left, right]),
        pair([left, left], [right, left]),
        pair([left, left, left], [left, left, right]),
    ]

    assert LengthLimit(recipe_of(place, "model.max_length=100")).equal(pairs) == [True, False, True]
    assert LengthLimit(recipe_of(place)).equal(pairs) == [False] * 3
    assert LengthLimit(recipe_of(place, "model.max_length=1")).equal(pairs) == [True] * 3


def test_pairs_that_part_too_late_are_counted_and_not_trained():
    """Of two, one; a pair of branches counts for both of its sides, one of a correction for the failure."""
    turn = Turn((), Action("a"))
    played = [Trajectory(Task(name), (turn,) * 3) for name in "ab"]
    pairs = [PreferencePair(one, replace(one, turns=one.turns[:2])) for one in played]
    inputs = RowInputs(played, limit=Limit(equal=lambda pairs: [True, False]))

    of_branches = parting((pairs, Counter(kept=4, too_long=0)), inputs, each=2)
    corrected = parting((pairs, Counter(kept=2, cut=2)), inputs)

    assert of_branches == (pairs[1:], Counter(kept=2, too_long=2))
    assert corrected == (pairs[1:], Counter(kept=1, too_long=1, cut=1))


def test_a_side_that_is_cut_to_the_shared_turns_makes_no_pair(place, monkeypatch):
    """The deciding turn of the rejected side does not fit; an episode that ended there was not cut."""
    monkeypatch.chdir(place)
    said = ({"role": "user", "content": "Go on."},)
    left, right = Turn(said, Action("Action: left")), Turn(said, Action("Action: right " + "far " * 150))
    chosen, cut, ended = (Trajectory(Task("t"), turns) for turns in ((left, left), (left, right), (left,)))
    pairs = [PreferencePair(chosen, cut), PreferencePair(cut, chosen), PreferencePair(chosen, ended)]

    limit = LengthLimit(recipe_of(place, "model.max_length=100"))
    assert limit.equal(pairs) == [True, True, False]

    silent = Trajectory(Task("t"), (Turn(said, Action("", reasoning="so far", ended=False)),))
    assert limit.equal([PreferencePair(chosen, silent)]) == [True]
    assert limit.too_long([silent]) == {("t", 0)}
