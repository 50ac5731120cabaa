"""`--dry-run`: what would be done, with estimates, and nothing written."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from perturn.cli import main
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.errors import DataError
from perturn.estimate import episode_lengths, machine_speed
from perturn.estimate.dry_run import Plan, Planned, make_plan, print_plan
from perturn.run.execute import open_run, run_stages

SAMPLED_THREE_TIMES = ["evaluate.sampling.temperature=1.0", "evaluate.select={name: likelihood, samples: 3}"]


@pytest.fixture(scope="module", autouse=True)
def measured_once():
    """The machine is measured once for each model, which takes a second."""
    measure, found = machine_speed.measure_machine, {}

    def measured(model, setting, process_gb):
        key = (str(model.config), setting)
        if key not in found:
            found[key] = measure(model, setting, process_gb)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_speed, "measure_machine", measured)
        yield


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
    assert "4 expert episodes played now; on average 1.0 turns" in plan.how[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_branches_cost_the_half_of_episodes_that_is_their_own(recipe):
    """8 explored of about 3 turns, played on 3 times before turns 1 and 2: 48, of which half the turns are played."""
    branched = ["rows.name=branch-pairs", "explore.name=branches", "explore.every=1", "explore.branches=3"]
    steps = make_plan(recipe, branched, None).steps
    one = {step.name: step for step in make_plan(recipe, [*branched, "explore.branches=1"], None).steps}
    work = {step.name: step for step in steps}

    assert [step.name for step in steps][4:8] == ["explore", "branch", "pair", "align"]
    assert work["branch"].work == "48 continuations from turns of 8 episodes (assumed)"
    assert one["branch"].work == "16 continuations from turns of 8 episodes (assumed)"
    assert work["branch"].seconds > work["explore"].seconds
    assert one["branch"].seconds == pytest.approx(one["explore"].seconds)


@pytest.mark.parametrize(
    ("explorer", "branches"),
    [
        ("{name: entropy-branches, chance: 0.25, gain: 0}", 7),
        ("{name: entropy-branches}", 12),
        ("{name: mixed-branches, branches: 1, others: episodes}", 8),
        ("{name: mixed-branches, branches: 3, forks: 5, others: episodes}", 48),
    ],
)
def test_branches_of_a_choice_are_within_its_budget(recipe, explorer, branches):
    """8 episodes of about 3 turns: with chance c, a share 1 - (1 - c)**2 of them has one of two possible forks."""
    own = (f"explore.{key}={value}" for key, value in yaml.safe_load(explorer).items())
    words = ["rows.name=branch-pairs", *own]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == f"{branches} continuations from turns of 8 episodes (assumed)"


def test_searched_trees_have_so_many_episodes_each(recipe):
    words = ["rows.name=tree-pairs", "explore.name=mcts", "explore.simulations=6"]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == "48 continuations from turns of 8 episodes (assumed)"
    assert found["align"].startswith(
        "18 pairs (assumed)"
    )  # three of four, where 3 - 1 more actions were drawn


def test_a_group_is_assumed_to_give_one_pair(recipe):
    """There are 4 groups of 2 explored episodes. Three quarters of the groups are assumed to give a pair."""
    found = {step.name: step.work for step in make_plan(recipe, ["rows.name=group-pairs"], None).steps}

    assert found["align"].startswith("3 pairs (assumed)")


def test_pairs_of_branches_are_counted_by_the_turns_that_they_begin_at(recipe):
    """8 explored ones, each played on before turns 1 and 2, so 16 groups, of which three of four give a pair."""
    words = ["rows.name=branch-pairs", "explore.name=branches", "explore.every=1", "explore.branches=3"]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == "48 continuations from turns of 8 episodes (assumed)"
    assert found["align"].startswith("12 pairs (assumed)")


@pytest.mark.slow
def test_branches_that_are_trained_on_count(recipe):
    """8 explored ones, played on 3 times before turns 1 and 2, which `spo` reads and `portool` trains on too."""
    words = [
        "rows=null",
        "rows={name: groups}",
        "explore.name=branches",
        "explore.every=1",
        "explore.branches=3",
        "align.loss={name: ppo-clip}",
    ]
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
    words = ["rows.name=step-pairs", "explore.name=expert-branches", "explore.every=1", "explore.branches=3"]
    found = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert found["branch"] == "0 continuations from turns of 4 episodes (assumed)"


@pytest.mark.slow
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
    words = [*SAMPLED_THREE_TIMES[:1], "evaluate.select={name: likelihood, among: actions, samples: 3}"]

    work = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert work["evaluate-base"] == "4 episodes of split test, about 5 turns each, 3 actions a turn"
    assert work["explore"] == "8 episodes of split train, about 3 turns each"


@pytest.fixture
def same_machine(monkeypatch):
    """The machine is measured once, and episodes take no time: other work cannot make one of two plans longer."""
    monkeypatch.setattr(episode_lengths, "time", SimpleNamespace(monotonic=lambda: 0.0))
    for name in ("measure_machine", "measure_passes"):
        monkeypatch.setattr(machine_speed, name, cached_once(getattr(machine_speed, name)))


def cached_once(measure):
    """Measures the first time alone."""
    found = []

    def measured(*arguments):
        if not found:
            found.append(measure(*arguments))
        return found[0]

    return measured


@pytest.mark.usefixtures("same_machine")
@pytest.mark.parametrize("among", ["episodes", "actions"])
def test_a_head_that_chooses_costs_passes_over_what_it_reads(recipe, among):
    """The explored episodes, and those among which it chooses; by likelihood nothing more is read."""
    read, plain = (
        {
            step.name: step
            for step in make_plan(
                recipe, [*SAMPLED_THREE_TIMES[:1], f"evaluate.select={{name: {name}, among: {among}}}"], None
            ).steps
        }
        for name in ("value", "likelihood")
    )

    assert (
        read["evaluate-base"].work
        == f"{plain['evaluate-base'].work}, chosen by a value head trained on 8 explored episodes"
    )
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


@pytest.mark.slow
def test_a_credit_that_reads_the_policy_costs_a_pass_over_the_episodes(recipe):
    """Infopo's passes, of one quantity; rloo reads none."""
    groups = ["rows={name: groups}", "align.loss={name: ppo-clip}", "explore.sampling.temperature=1.0"]
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
    """All that succeeded are taught, whatever the task list of 4."""
    run_stages(open_run(recipe, [f"output={tmp_path / 'before'}"], "collect"), "collect")
    rows = (next(tmp_path.glob("before/*")) / "trajectories/expert.jsonl").read_text().splitlines()
    failed = rows[0].replace('"success":true', '"success":false').replace('"sample":0', '"sample":7')
    (tmp_path / "own.jsonl").write_text("\n".join([*rows, failed]) + "\n")

    plan = make_plan(recipe, [f"expert.file={tmp_path / 'own.jsonl'}"], None)

    assert next(step.work for step in plan.steps if step.name == "sft").startswith("8 episodes, 1 epochs")
    assert plan.how[0].startswith("Lengths: 9 recorded expert episodes; on average 1.0 turns")


def test_rows_of_ones_own_give_the_lengths(tiny_folder, tmp_path, monkeypatch):
    """There is no environment to play in: a pair of two turns and of one has 1.5 turns on average."""
    monkeypatch.chdir(tmp_path)
    said = [{"role": role, "content": "up"} for role in ("assistant", "user", "assistant")]
    row = {"prompt": [{"role": "user", "content": "on"}], "chosen": said, "rejected": said[:1]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    align = "align: {loss: {name: dpo}}"
    (tmp_path / "own.yaml").write_text(
        f"name: own\nmodel: {{name: {tiny_folder}}}\nrows: {{name: file, path: pairs.jsonl}}\n{align}\n"
    )

    how = make_plan(tmp_path / "own.yaml", [], None).how[0]

    assert how.startswith("Lengths: the first 1 rows of pairs.jsonl; on average 1.5 turns")
    assert "turn limit" not in how


def test_conversations_of_ones_own_are_counted_for_sft(tiny_folder, tmp_path, monkeypatch):
    """Without an environment there is no task list: 3 conversations of 1 turn."""
    monkeypatch.chdir(tmp_path)
    said = [{"role": role, "content": "up"} for role in ("user", "assistant")]
    (tmp_path / "talks.jsonl").write_text(3 * (json.dumps({"messages": said}) + "\n"))
    (tmp_path / "own.yaml").write_text(
        f"name: own\nmodel: {{name: {tiny_folder}}}\nexpert: {{file: talks.jsonl}}\nsft: {{loss: {{name: sft}}}}\n"
    )

    plan = make_plan(tmp_path / "own.yaml", [], None)

    assert next(step.work for step in plan.steps if step.name == "sft").startswith("3 episodes, 1 epochs")
    assert plan.how[0].startswith("Lengths: 3 recorded expert episodes; on average 1.0 turns")
    assert "turn limit" not in plan.how[0]


def test_labelled_rows_of_ones_own_give_the_lengths(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = [{"role": "assistant", "content": "up"}]
    rows = [
        {"prompt": [{"role": "user", "content": "on"}], "completion": said, "label": good}
        for good in (True, False)
    ]
    (tmp_path / "thumbs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        f"name: own\nmodel: {{name: {tiny_folder}}}\nalign: {{loss: {{name: kto}}}}\n"
        "rows: {name: file, path: thumbs.jsonl, holds: labelled}\n"
    )

    how = make_plan(tmp_path / "own.yaml", [], None).how[0]

    assert how.startswith("Lengths: the first 2 rows of thumbs.jsonl; on average 1.0 turns")


def test_pairs_of_ones_own_that_cannot_be_trained_on_are_rejected_before_the_run(tmp_path, monkeypatch):
    """The sides differ in a word that the model does not know; no run folder is made."""
    monkeypatch.chdir(tmp_path)
    chosen, rejected = ([{"role": "assistant", "content": word}] for word in ("zzz", "yyy"))
    row = {"prompt": [{"role": "user", "content": "go"}], "chosen": chosen, "rejected": rejected}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    recipe = {"model": {"name": "tiny-agent"}, "rows": {"name": "file", "path": "pairs.jsonl"}}

    with pytest.raises(DataError, match=r"pairs.jsonl:1: chosen and rejected have the same tokens"):
        open_run(parse(Recipe, {"name": "own", "align": {"loss": {"name": "dpo"}}} | recipe), [])
    assert not (tmp_path / "runs").exists()


def test_what_is_done_shows_what_it_took(recipe):
    """And recorded expert episodes give the lengths."""
    run = open_run(recipe)
    run_stages(run, "collect")
    before = sorted(run.folder.rglob("*"))

    plan = make_plan(run.folder, [], "collect")

    assert [(step.name, step.state) for step in plan.steps] == [("expert", "done"), ("explore", "to do")]
    assert plan.steps[0].seconds == run.manifest["stages"]["expert"]["seconds"]
    assert plan.seconds == plan.startup + plan.steps[1].seconds
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


def test_start_up_counts():
    """It is a row of the table and a part of what is left to do."""
    plan = Plan("runs/x", [Planned("sft", "to do", "4 episodes", 5.0, 1.0)], [], [], startup=7.0)
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan, console)

    assert plan.seconds == 12.0
    assert plan.to_dict()["startup"] == 7.0
    text = console.export_text()
    assert "start-up" in text
    assert "~12 s left to do" in text


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

    rows = [line.split() for line in console.export_text().splitlines()[3:6]]
    assert rows[0][:2] == ["expert", "done"]
    assert " ".join(rows[1]) == "explore x 3 1 done 8 episodes, each time ~6 s ~3.0 GB"
    assert rows[2][0] == "evaluate-ppo-clip"
