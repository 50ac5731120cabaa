"""Pairs that end with one turn, from end to end: by the expert or by oneself, and by what a step cost."""

import json
from pathlib import Path

import pytest

from perturn.data.iterations import ledger_of
from perturn.data.pairs import actions_of
from perturn.data.store import read_pairs, read_trajectories
from perturn.report import write_report
from perturn.run.loop import open_run, run_stages
from perturn.run.plan import make_plan
from perturn.settings.recipe import read_recipe

from .test_steps import SHRUNK

RECIPE = Path(__file__).parents[2] / "recipes" / "alfworld-like_lab.yaml"
WORDS = [
    *(word for word in SHRUNK if not word.startswith(("branch", "explore.per_iteration"))),
    "protocol.max_turns=8",
    "align.shared_prefix=mask",
]
METHODS = {
    "step-dpo": [
        "align.loss={name: dpo}",
        "pair={within: correction, length: turn, remaining: searching}",
    ],
    "step-dpo-own": [
        "align.loss={name: tlm-dre}",
        "branch={at: wrong, of: failures, samples: 6}",
        "pair={within: branch, by: progress, length: turn, remaining: searching}",
    ],
    "tp-llama": [
        "align.loss={name: dpo}",
        "branch={of: expert, every: 1, samples: 2}",
        "pair={within: branch, length: turn}",
    ],
    "incorrect": [
        "align.loss={name: dpo}",
        "branch={of: failures, every: 1, samples: 2}",
        "pair={within: branch, by: drop, length: turn, threshold: 0.3}",
    ],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the runs are."""
    return tmp_path_factory.mktemp("turns")


def words_of(name, place):
    return [*WORDS, *METHODS[name], f"name={name}", f"output={place}"]
