"""What a dry run assumes of policies that learn from no expert, and of stages whose files were removed."""

from perturn.estimate.dry_run import make_plan
from perturn.run.execute import open_run, run_stages


def test_a_policy_without_sft_is_assumed_to_take_all_turns(recipe):
    """It learns online from groups; after SFT, about 3 of 5 turns are assumed."""
    words = [
        "rows=null",
        "rows={name: groups}",
        "credit={name: rloo}",
        "align.loss={name: ppo-clip}",
        "sft=null",
    ]
    work = {step.name: step.work for step in make_plan(recipe, words, None).steps}

    assert work["explore"] == "8 episodes of split train, about 5 turns each"
    assert work["evaluate-ppo-clip"] == "4 episodes of split test, about 5 turns each"


def test_a_stage_whose_files_were_removed_is_to_do(recipe):
    run = open_run(recipe)
    run_stages(run, "collect", ["expert"])
    assert run.is_done("expert")
    run.paths.trajectories("expert").unlink()

    assert make_plan(run.folder, [], "collect").steps[0].state == "to do"
