"""`--dry-run`: what would be done, with estimates, and nothing written."""

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from perturn.cli import main
from perturn.policy.models import empty_model
from perturn.run.costs import (
    KEPT_BY_ALLOCATOR,
    fitting_seconds,
    generation_seconds,
    judged_tokens,
    opening_seconds,
    passing_seconds,
    trained_tokens,
    training_gb,
    training_seconds,
)
from perturn.run.lengths import Episodes
from perturn.run.loop import open_run, run_stages
from perturn.run.machine import Machine, measure_machine, measure_passes
from perturn.run.plan import Plan, Planned, make_plan, print_plan
from perturn.settings.sections import Align, Lora, Train

SAMPLED_THREE_TIMES = ["evaluate.sampling.temperature=1.0", "evaluate.best_of.samples=3"]


def test_the_plan_of_a_run_counts_its_work_and_writes_nothing(recipe, tmp_path):
    """4 + 4 expert episodes, 4 evaluated by each policy, 4 x 2 explored, of which 6 are assumed to become pairs."""
    plan = make_plan(recipe, [], None)

    work = {step.name: step.work for step in plan.steps}
    assert list(work)[:4] == ["expert", "evaluate-base", "sft", "evaluate-sft"]
    assert work["expert"] == "8 episodes"
    assert work["evaluate-base"] == "4 episodes of split test, about 5 turns each"
    assert work["explore"] == "8 episodes of split train, about 3 turns each"
    assert work["sft"].startswith("4 episodes, 1 epochs")
    assert work["align"].startswith("6 pairs (assumed)")
    assert all(step.state == "to do" and step.seconds > 0 and step.memory_gb > 0 for step in plan.steps)
    assert plan.startup > 0
    assert plan.seconds == pytest.approx(plan.startup + sum(step.seconds for step in plan.steps))
    assert "4 expert episodes played now: 1.0 turns" in plan.how[0]
    assert not (tmp_path / "runs").exists()


def test_branches_cost_the_half_of_episodes_that_is_their_own(recipe):
    """8 explored of about 3 turns, played on 3 times before turns 1 and 2: 48, of which half the turns are played."""
    branched = ["pair.within=branch", "branch.every=1", "branch.samples=3"]
    steps = make_plan(recipe, branched, None).steps
    one = {step.name: step for step in make_plan(recipe, [*branched, "branch.samples=1"], None).steps}
    work = {step.name: step for step in steps}

    assert [step.name for step in steps][4:8] == ["explore", "branch", "pair", "align"]
    assert work["branch"].work == "48 episodes played on from turns of 8 (assumed)"
    assert one["branch"].work == "16 episodes played on from turns of 8 (assumed)"
    assert work["branch"].seconds > work["explore"].seconds
    assert one["branch"].seconds == pytest.approx(one["explore"].seconds)


@pytest.mark.parametrize(
    ("branch", "branches"),
    [
        ("{at: entropy, samples: 2, chance: 0.25, gain: 0}", 8),
        ("{at: entropy, samples: 2}", 16),
        ("{at: mixed, samples: 1, others: episodes}", 8),
        ("{at: mixed, samples: 3, forks: 5, others: episodes}", 48),
    ],
)
def test_branches_of_a_choice_are_within_its_budget(recipe, branch, branches):
    """8 episodes of about 3 turns: at a chance of 1/4 half of them have one, else each has; of 2 turns at most."""
    words = ["pair.within=branch", f"branch={branch}"]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == f"{branches} episodes played on from turns of 8 (assumed)"


def test_searched_trees_have_so_many_episodes_each(recipe):
    words = ["pair.within=tree", "branch={search: {simulations: 6}}"]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == "48 episodes played on from turns of 8 (assumed)"
    assert found["align"].startswith(
        "18 pairs (assumed)"
    )  # three of four, where 3 - 1 more actions were drawn


def test_pairs_of_branches_are_counted_by_the_turns_that_they_begin_at(recipe):
    """8 explored ones, each played on before turns 1 and 2, so 16 groups, of which three of four give a pair."""
    words = ["pair.within=branch", "branch={every: 1, samples: 3}"]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == "48 episodes played on from turns of 8 (assumed)"
    assert found["align"].startswith("12 pairs (assumed)")


def test_branches_that_are_trained_on_count(recipe):
    """8 explored ones, played on 3 times before turns 1 and 2, which `spo` reads and `portool` trains on too."""
    words = ["pair=null", "groups={}", "branch={every: 1, samples: 3}", "align.loss={name: ppo-clip}"]
    spo, portool = (
        {step.name: step for step in make_plan(recipe, [*words, f"credit={{name: {name}}}"], None).steps}
        for name in ("spo", "portool")
    )

    assert spo["credit"].work == "groups of 8 explored episodes"
    assert portool["credit"].work == "groups of 8 explored episodes and 48 branches"
    assert spo["align"].work.startswith("8 episodes")
    assert portool["align"].work.startswith("56 episodes")


def test_branches_of_the_expert_are_of_his_turns(recipe):
    """He has one episode of each of the 4 explored tasks, of one turn, so that there is no other to play on from."""
    words = ["pair.within=step", "branch={of: expert, every: 1, samples: 3}"]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == "0 episodes played on from turns of 4 (assumed)"


def test_the_best_of_several_episodes_costs_all_of_them(recipe):
    """Three of each of 4 tasks, in the work and in the time."""
    plain, best = (
        {step.name: step for step in make_plan(recipe, words, None).steps}
        for words in (["evaluate.sampling.temperature=1.0"], SAMPLED_THREE_TIMES)
    )

    assert best["evaluate-base"].work == "12 episodes of split test, about 5 turns each"
    assert best["explore"].work == plain["explore"].work
    assert best["evaluate-base"].seconds > plain["evaluate-base"].seconds


def test_several_actions_a_turn_cost_their_tokens(recipe):
    """As many episodes and turns; exploration is as it was."""
    words = [*SAMPLED_THREE_TIMES[:1], "evaluate.rerank.samples=3"]

    work = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert work["evaluate-base"] == "4 episodes of split test, about 5 turns each, 3 actions a turn"
    assert work["explore"] == "8 episodes of split train, about 3 turns each"


@pytest.mark.parametrize("way", ["best_of", "rerank"])
def test_a_head_that_chooses_costs_passes_over_what_it_reads(recipe, way):
    """The explored episodes, and those among which it chooses; by likelihood nothing more is read."""
    read, plain = (
        {
            step.name: step
            for step in make_plan(recipe, [*SAMPLED_THREE_TIMES[:1], f"evaluate.{way}.by={by}"], None).steps
        }
        for by in ("value", "likelihood")
    )

    assert read["evaluate-base"].work == f"{plain['evaluate-base'].work}, chosen by a head on 8 explored ones"
    assert read["evaluate-base"].seconds > plain["evaluate-base"].seconds
    assert read["explore"].work == plain["explore"].work


@pytest.mark.parametrize(
    ("control", "turns"), [("{limit: 2}", 2), ("{limit: 2, extend: 3, times: 2}", 8), ("{extend: 3}", 8)]
)
def test_turns_are_estimated_with_all_extensions(recipe, control, turns):
    """Of the evaluation alone; the protocol's limit is 5."""
    steps = make_plan(recipe, [f"evaluate.turns={control}"], None).steps

    work = {step.name: step.work for step in steps}
    assert work["evaluate-base"] == f"4 episodes of split test, about {turns} turns each"
    assert work["explore"] == "8 episodes of split train, about 3 turns each"


def test_a_credit_that_reads_the_policy_costs_a_pass_over_the_episodes(recipe):
    """Infopo's passes, of one quantity; rloo reads none."""
    groups = ["pair=null", "groups={}", "align.loss={name: ppo-clip}", "explore.sampling.temperature=1.0"]
    plain, read = (
        {step.name: step for step in make_plan(recipe, [*groups, f"credit={{name: {name}}}"], None).steps}
        for name in ("rloo", "infopo")
    )

    assert plain["credit"].work == "groups of 8 explored episodes"
    assert plain["credit"].seconds == 1.0
    assert read["credit"].work == "groups of 8 explored episodes, read for feedback"
    assert read["credit"].seconds > 1.0
    assert read["credit"].memory_gb > plain["credit"].memory_gb


def test_episodes_of_ones_own_are_counted_and_give_the_lengths(recipe, tmp_path):
    """All that succeeded are taught, whatever the panel of 4."""
    run_stages(open_run(recipe, [f"output={tmp_path / 'before'}"], "collect"), "collect")
    rows = (next(tmp_path.glob("before/*")) / "trajectories/expert.jsonl").read_text().splitlines()
    failed = rows[0].replace('"success":true', '"success":false').replace('"sample":0', '"sample":7')
    (tmp_path / "own.jsonl").write_text("\n".join([*rows, failed]) + "\n")

    plan = make_plan(recipe, [f"expert.file={tmp_path / 'own.jsonl'}"], None)

    assert next(step.work for step in plan.steps if step.name == "sft").startswith("8 episodes, 1 epochs")
    assert plan.how[0].startswith("Lengths: 9 recorded expert episodes: 1.0 turns")


def test_what_is_done_shows_what_it_took(recipe):
    """And recorded expert episodes give the lengths."""
    run = open_run(recipe)
    run_stages(run, "collect")
    before = sorted(run.folder.rglob("*"))

    plan = make_plan(run.folder, [], "collect")

    assert [(step.name, step.state) for step in plan.steps] == [("expert", "done"), ("explore", "to do")]
    assert plan.steps[0].seconds == run.manifest["stages"]["expert"]["seconds"]
    assert plan.seconds == plan.steps[1].seconds
    assert plan.how[0].startswith("Lengths: 8 recorded expert episodes")
    assert sorted(run.folder.rglob("*")) == before


@pytest.mark.parametrize("command", ["run", "collect", "pair", "train", "evaluate"])
def test_every_stage_has_a_dry_run_that_refuses_what_it_would_refuse(
    recipe, tmp_path, monkeypatch, capsys, command
):
    """JSON for machines; a wrong loss is one line and code 2."""
    codes = []
    for words in (["--json"], ["align.loss.name=dop"]):
        monkeypatch.setattr(sys, "argv", ["perturn", command, str(recipe), "--dry-run", *words])
        try:
            main()
        except SystemExit as end:
            codes.append(end.code or 0)

    printed = capsys.readouterr()
    assert codes == [0, 2]
    assert {step["state"] for step in json.loads(printed.out)["steps"]} == {"to do"}
    assert "Did you mean 'dpo'?" in printed.err
    assert not (tmp_path / "runs").exists()


def test_a_server_is_not_estimated(recipe, monkeypatch):
    """Its time is not ours to know; the bound of the recipe is shown."""
    monkeypatch.setenv("SOME_KEY", "0")
    api = ["engine.name=api", "engine.api_key_env=SOME_KEY", "engine.max_tokens_total=1000"]

    plan = make_plan(recipe, [*api, "sft=null", "align=null", "explore=null"], None)

    assert [step.name for step in plan.steps] == ["evaluate-base"]
    assert plan.steps[0].seconds is None
    assert "engine's bound: 1000" in plan.how[0]


MACHINE = Machine(
    parameters=1_000_000, layers=10, hidden=100, device="cpu", bytes=4, many=1e9, few=1e9, base_gb=1.0
)
EPISODES = Episodes(
    sft=4, expert=8, explore=8, evaluate=4, limit=5, turns=3, prompt=100, heard=20, said=10, seconds=0.1
)


def test_tokens_are_worked_by_hand():
    """Expert: 100 + 2 * 20 + 3 * 10 = 170. Taught policy, 4 turns: 100 + 3 * 20 + 4 * 10 = 200."""
    assert trained_tokens(EPISODES, 2, on_pairs=False) == 2 * 170
    assert trained_tokens(EPISODES, 2, on_pairs=True) == 2 * 370


def test_what_a_head_reads_is_worked_by_hand():
    """Of 4 turns: 8 explored of 200 and 12 drawn; up to the turns of each 110, 140, 170 and 200."""
    assert judged_tokens(EPISODES, 12, at_turns=False) == 20 * 200
    assert judged_tokens(EPISODES, 12, at_turns=True) == 8 * 200 + 12 * (110 + 140 + 170 + 200)


@pytest.mark.parametrize(
    ("settings", "operations"),
    [({}, 6), ({"epochs": 2.0}, 12), ({"lora": Lora()}, 4), ({"gradient_checkpointing": True}, 8)],
)
def test_training_is_worked_by_hand(settings, operations):
    """Operations a parameter and token, 1M parameters, 1000 tokens, 0.7 GFLOP/s; 2 more for a reference."""
    train = Train({"name": "dpo"}, **settings)

    assert training_seconds(MACHINE, train, 1000, False) == pytest.approx(operations / 0.7)
    assert training_seconds(MACHINE, train, 1000, True) == pytest.approx((operations + 2) / 0.7)


def test_generation_is_worked_by_hand():
    """Untaught, 5 turns of 30 tokens, 4 at once: 350 tokens read each, 150 steps of 4 ms and 40 times 0.2 ms."""
    seconds = generation_seconds(MACHINE, EPISODES, 4, 16, learned=False, most=30)

    assert seconds == pytest.approx(4 * 350 * 2e-3 + 150 * (4e-3 + 40 * 2e-4))


def test_candidates_are_written_at_the_same_time():
    """Three a turn: 100 + 5 * (20 + 3 * 30) = 650 tokens each; as many steps, in each of which 12 are written."""
    seconds = generation_seconds(MACHINE, EPISODES, 4, 16, learned=False, most=30, candidates=3)

    assert seconds == pytest.approx(4 * 650 * 2e-3 + 150 * (4e-3 + 120 * 2e-4))


def test_slow_worlds_decide():
    """4 episodes of 5 turns of 10 s each: worlds and engine work side by side."""
    slow = replace(EPISODES, seconds=10.0)

    assert generation_seconds(MACHINE, slow, 4, 16, learned=False, most=30) == pytest.approx(4 * 5 * 10.0)


def test_memory_of_training_grows_with_what_is_trained():
    """12 bytes less for a frozen parameter; a checkpointed model keeps one layer's activations."""
    whole = training_gb(MACHINE, Train({"name": "sft"}))

    frozen = training_gb(MACHINE, Train({"name": "sft"}, lora=Lora()))
    checkpointed = training_gb(MACHINE, Train({"name": "sft"}, gradient_checkpointing=True))

    assert whole - frozen == pytest.approx(0.012 * KEPT_BY_ALLOCATOR)
    assert checkpointed < whole


def test_the_machine_has_the_size_of_the_model_and_a_speed(tiny_folder, tiny_model):
    """Without reading its weights."""
    machine = measure_machine(empty_model(str(tiny_folder)), "float32", process_gb=1.0)

    assert machine.parameters == sum(each.numel() for each in tiny_model.parameters())
    assert (machine.layers, machine.hidden, machine.bytes) == (2, 32, 4)
    assert machine.many > 0
    assert machine.few > 0


def test_rows_of_groups_are_as_long_as_the_policys_episodes():
    """A taught policy takes 4 turns: 100 + 3 * 20 + 4 * 10 = 200 tokens."""
    assert trained_tokens(EPISODES, 2, on_pairs=False, own=True) == 2 * 200


def test_a_measured_pass_takes_the_place_of_matrix_products():
    """1000 tokens, 2 ms each to train on and 0.5 ms each to read: 2 epochs and a reference are 4.5 s."""
    measured = replace(MACHINE, passed=0.0005, trained=0.002)
    train = Train({"name": "dpo"}, epochs=2.0)

    assert training_seconds(measured, train, 1000, True) == pytest.approx(4.5)
    assert passing_seconds(measured, 2 * 1000) == pytest.approx(0.5)


def test_opening_is_worked_by_hand():
    """Half a second, 4 MB of weights at 1 GB/s, and 4 worlds of 3 s each, two at a time."""
    found = replace(EPISODES, world_seconds=3.0)

    assert opening_seconds(MACHINE, found, 4, 16, cores=2) == pytest.approx(0.5 + 0.004 + 6.0)
    assert opening_seconds(None, found, 1, 16, cores=2) == pytest.approx(0.5 + 3.0)


def test_a_training_has_steps_beside_its_passes():
    """2 s, 4 MB of weights loaded and saved at 1 GB/s, and 30 ms for each of the steps: 2 epochs of 3, or of 5."""
    sft = Train({"name": "sft"}, epochs=2.0, batch_size=4)
    online = Align({"name": "ppo-clip"}, epochs=2.0, minibatches=5)

    assert fitting_seconds(MACHINE, sft, 10) == pytest.approx(2.008 + 6 * 0.03)
    assert fitting_seconds(MACHINE, online, 10) == pytest.approx(2.008 + 10 * 0.03)


def test_a_pass_of_a_small_model_is_measured(tiny_folder):
    """Forward and backward take longer than forward alone; a large model is not made."""
    model = empty_model(str(tiny_folder))

    measured = measure_passes(MACHINE, model, [20, 4, 10, 4], token_budget=64)

    assert measured.passed is not None
    assert measured.trained is not None
    assert 0 < measured.passed < measured.trained
    large = replace(MACHINE, parameters=10**9)
    assert measure_passes(large, model, [20, 4, 10, 4], token_budget=64) == large


def test_start_up_counts():
    """It is a row of the table and a part of what is left to do."""
    plan = Plan("runs/x", [Planned("sft", "to do", "4 episodes", 5.0, 1.0)], [], [], startup=7.0)
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan, console)

    assert plan.seconds == 12.0
    assert plan.to_dict()["startup"] == 7.0
    text = console.export_text()
    assert "start-up" in text
    assert "left to do: ~12 s" in text


def test_iterations_are_shown_together():
    """150 iterations are not 600 lines: the work of one, the time of all, the memory of the largest."""
    steps = [Planned("expert", "done", "4 episodes", 1.0, 0.5)]
    steps += [
        Planned(f"{name}-{n:03d}", "done" if n == 1 else "to do", "8 episodes", 2.0, float(n))
        for n in (1, 2, 3)
        for name in ("explore", "evaluate-ppo-clip")
    ]
    console = Console(record=True, width=200, file=io.StringIO())

    print_plan(Plan("runs/one", steps, [], []), console)

    rows = [line.split() for line in console.export_text().splitlines()[2:5]]
    assert rows[0][:2] == ["expert", "done"]
    assert " ".join(rows[1]) == "explore x 3 1 done 8 episodes, each time ~6 s ~3.0 GB"
    assert rows[2][0] == "evaluate-ppo-clip"
