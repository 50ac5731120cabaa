"""`perturn measure` negates weights in failed episodes only if they are for the sides of a pair."""

from dataclasses import replace

from perturn.credit import CREDITS
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.measure.weigh import weigh
from perturn.report.measured import counts_said
from perturn.run.stages.credit_stage import explored_stages

from .online import GROUPS

SCORES = """
from dataclasses import dataclass
import torch
from perturn.extend.tensors import CreditTraits

@dataclass(frozen=True)
class Ones:
    needs = ()
    traits = CreditTraits()

    def __call__(self, group, **_):
        return [torch.ones(len(one.turns)) for one in group]
"""


def test_scores_keep_their_sign_in_failed_episodes(run_once, monkeypatch, tmp_path):
    """A model of process rewards gives 1 to a good turn, also if the episode failed."""
    run = run_once("measured", *GROUPS, "iterations=1", "evaluate=null")
    monkeypatch.chdir(run.parents[1])
    (tmp_path / "scores.py").write_text(SCORES)
    paths, recipe, own = RunPaths(run), resolve_recipe(run), f"{tmp_path / 'scores.py'}:Ones"
    stage = explored_stages(paths, recipe)[-1]
    failed = [replace(one, success=False) for one in read_trajectories(paths.trajectories(stage.name))]

    found, _ = weigh(paths, recipe, stage, [own, "uniform"], failed)
    assert all((weights == 1).all() for weights in found[own].weights.values())
    assert all((weights == -1).all() for weights in found["uniform"].weights.values())


def test_only_weights_of_pairs_are_negated():
    """Scores, advantages and values are not."""
    negated = {name for name, credit in CREDITS.items() if credit().traits.weighs_sides}

    assert negated == {"uniform", "confidence", "discount", "first-error"}


def test_the_command_and_the_report_name_negated_weights():
    names = ("measured", "turns", "episodes", "tasks", "continuations", "played", "failed", "came_elsewhere")
    credits = {"uniform": {"by_outcome": True}, "rloo": {"by_outcome": False}}

    said = counts_said(dict.fromkeys(names, 0) | {"credits": credits})
    assert said.endswith(" In failed episodes, the weights of uniform are negated.")
