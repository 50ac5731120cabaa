"""Control of turns in an evaluation: its episodes, its protocol, what it cost, and going on after a kill."""

import json
from math import ceil

from typer.testing import CliRunner

from perturn.analysis.number_text import protocol_line
from perturn.analysis.run_comparison import compare_runs
from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.config.stages import stages
from perturn.data.store import read_trajectories
from perturn.report import summarize, write_report
from perturn.rules import TurnControl
from perturn.run.execute import open_run, run_stages
from perturn.run.stages.evaluation_strategy import controlled, extension_counts
from perturn.types import Action, EpisodeProtocol, Task, Trajectory, Turn

PLAIN = [
    "evaluate.tasks.per_kind=4",
    "evaluate.sampling={temperature: 1.0, max_new_tokens: 4}",
    *("sft=null", "rows=null", "explore=null", "align=null"),
]
CONTROLLED = [*PLAIN, "evaluate.turns={limit: 2, extend: 2, times: 2, progress: null}"]
RESTRICTED = [*PLAIN, "evaluate.turns={limit: 2}"]


def evaluated(recipe, words):
    """Score the base; the paths of the run and the counts of the stage."""
    with open_run(recipe, words, "evaluate") as run:
        run_stages(run, "evaluate")
        return run.paths, run.manifest["stages"]["evaluate-base"]["counts"]


def played(paths):
    return sorted(read_trajectories(paths.evaluation("base")), key=lambda one: one.key)


def test_episodes_go_on_where_the_first_limit_ended_them(recipe):
    """A tiny policy of noise solves nothing: 2 turns, or 2 + 2 * 2, and it is told."""
    paths, counts = evaluated(recipe, CONTROLLED)
    short, few = evaluated(recipe, [*RESTRICTED, "name=short"])

    extended = [len(one.turns) > 2 for one in played(paths)]
    assert [len(one.turns) for one in played(short)] == [2 if one.truncated else 1 for one in played(short)]
    assert all(len(one.turns) == 6 for one in played(paths) if one.truncated)
    assert counts["extended"] == sum(extended) > 0
    assert counts["extensions"] == sum(ceil((len(one.turns) - 2) / 2) for one in played(paths))
    assert (few["extended"], few["extensions"]) == (0, 0)
    assert played(paths)[0].turns[0].observation_text.endswith("\nYou have 2 turns left.")
    assert "You are given 2 turns more." in played(paths)[extended.index(True)].turns[2].observation_text


def test_the_counts_are_those_of_the_turns_beyond_the_limit():
    """Limit 4, extensions of 3: 4, 5, 7 and 8 turns are 0, 1, 1 and 2 extensions; a limit of a kind is its own."""
    turn = Turn(({"role": "user", "content": "?"},), Action("x"))
    lengths = [("", 4), ("", 5), ("", 7), ("", 8), ("long", 8)]
    episodes = [Trajectory(Task(f"{n}", kind), (turn,) * length) for n, (kind, length) in enumerate(lengths)]
    rules = EpisodeProtocol(
        "p", max_turns=4, max_turns_by_kind={"long": 8}, turns=TurnControl(extend=3, times=2)
    )

    assert extension_counts(episodes, rules) == {"extended": 3, "extensions": 4}


def test_a_named_protocol_under_control_is_no_longer_that_one():
    named, own = EpisodeProtocol("alfworld-eto"), EpisodeProtocol("mine")

    assert controlled(named, None) is named
    assert controlled(named, TurnControl()).name == "alfworld-eto-custom"
    assert controlled(own, TurnControl(limit=3)).name == "mine"


def test_the_stamp_and_a_comparison_name_it(recipe):
    """Limit and control stand in the protocol, so that nobody takes the scores as like for like."""
    paths, _ = evaluated(recipe, CONTROLLED)
    plain, _ = evaluated(recipe, [*PLAIN, "name=plain"])

    stamp = json.loads(paths.stamp.read_text())
    before = json.loads(plain.stamp.read_text())
    assert stamp["turns"] == {"limit": 2, "reminder": True, "extend": 2, "times": 2, "progress": None}
    assert (set(stamp["max_turns"].values()), set(before["max_turns"].values())) == ({2}, {5})
    assert "turns" not in before
    (found,) = compare_runs([plain.folder, paths.folder])
    differs = " ".join(found.differs)
    assert "turns.extend" in differs
    assert "max_turns" in differs


def test_a_killed_evaluation_goes_on_to_the_same_episodes(recipe):
    """Two episodes are left of it; the others are played again to the same turns, and so are all counts."""
    words = [*CONTROLLED, "deterministic=true", "evaluate.concurrency=2"]
    paths, counts = evaluated(recipe, words)
    whole = paths.evaluation("base").read_bytes()
    manifest = json.loads(paths.manifest.read_text())
    manifest["stages"]["evaluate-base"]["done"] = False
    manifest["files"] = {
        file: one for file, one in manifest["files"].items() if one["stage"] != "evaluate-base"
    }
    paths.manifest.write_text(json.dumps(manifest))
    paths.evaluation("base").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))

    _, again = evaluated(recipe, words)

    assert paths.evaluation("base").read_bytes() == whole
    assert again == counts


def test_the_command_and_the_report_say_what_it_cost(recipe):
    """Turns and tokens of an episode beside the score; a plain score has no such sentence."""
    shown = CliRunner().invoke(app, ["evaluate", str(recipe), *CONTROLLED])
    plain = CliRunner().invoke(app, ["evaluate", str(recipe), *PLAIN, "name=plain"])

    assert shown.exit_code == plain.exit_code == 0, shown.output + plain.output
    folder = recipe.parent / "runs" / "one"
    (row,) = summarize(folder)["policies"]
    cost = row["turn_control"]
    sentence = (
        f"base played {row['mean_turns']:.1f} turns and wrote {row['mean_tokens']:.1f} tokens per episode; "
        f"{cost['extended']} of {cost['episodes']} episodes were extended, {cost['extensions']} times in all."
    )
    assert sentence in shown.output
    assert sentence in write_report(folder).read_text()
    assert "extended" not in plain.output
    assert "turn_control" not in summarize(recipe.parent / "runs" / "plain")["policies"][0]


def test_the_best_of_several_costs_the_turns_of_all(recipe):
    paths, counts = evaluated(recipe, [*CONTROLLED, "evaluate.select={name: likelihood, samples: 2}"])

    (row,) = summarize(paths.folder)["policies"]
    cost = row["turn_control"]
    assert cost["episodes"] == 2 * row["n"]
    assert (cost["turns"], cost["action_tokens"]) == (counts["drawn_turns"], counts["drawn_action_tokens"])
    assert cost["extended"] == sum(len(one.turns) > 2 for one in read_trajectories(paths.drawn("base")))


def test_a_stamp_reads_as_one_line():
    turns = {"limit": 12, "reminder": True, "extend": 6, "times": 2, "progress": 5}
    stamp = {"name": "p", "max_turns": {"": 12}, "turns": turns, "seed": 1}
    silent = {"name": "p", "turns": turns | {"times": 1, "reminder": False}}
    all_ = {"name": "p", "turns": turns | {"progress": None}}

    assert protocol_line(stamp) == (
        "p; at most 12 turns; told how many turns are left; at most 2 extensions of 6 turns after progress within 5 "
        "turns; seed 1"
    )
    assert protocol_line(silent) == "p; at most 1 extension of 6 turns after progress within 5 turns"
    assert protocol_line(all_).endswith("at most 2 extensions of 6 turns for all that have not ended")


def test_the_score_is_a_stage_that_reads_it(recipe):
    """So that another limit makes another score of a shared policy."""
    found = [one for one in stages(read_recipe(recipe)) if one.command == "evaluate"]

    assert found
    assert all("evaluate.turns" in one.reads for one in found)
