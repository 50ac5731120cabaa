"""Facts of the ETO protocol on ScienceWorld: task lists and turn limits, in the names of ScienceWorld 1.2.3.

Source: the index lists published with Song et al. 2024, "Trial and Error: Exploration-Based Trajectory
Optimization for LLM Agents", arXiv:2403.02502. Differs: kept as sorted ranges (in `eto.json`); "mendellian" and the
`task-3-` prefixes are dropped from names.

The counts are 1483 / 194 / 211 (the paper prints 241 test tasks). `eto-train` reaches into ScienceWorld's
own dev range, and 54 of its tasks are in `eto-dev` too; `eto-test` shares no task with the other two.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from perturn.types import EpisodeProtocol

ETO_MAX_TURNS: dict[str, int] = {
    "boil": 100,
    "change-the-state-of-matter-of": 80,
    "chemistry-mix": 60,
    "chemistry-mix-paint-secondary-color": 15,
    "chemistry-mix-paint-tertiary-color": 30,
    "find-animal": 15,
    "find-living-thing": 15,
    "find-non-living-thing": 15,
    "find-plant": 15,
    "freeze": 80,
    "grow-fruit": 60,
    "grow-plant": 30,
    "identify-life-stages-1": 30,
    "identify-life-stages-2": 30,
    "lifespan-longest-lived": 10,
    "lifespan-longest-lived-then-shortest-lived": 12,
    "lifespan-shortest-lived": 10,
    "measure-melting-point-known-substance": 120,
    "melt": 80,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 30,
    "test-conductivity": 30,
    "test-conductivity-of-unknown-substances": 30,
    "use-thermometer": 30,
}
"""Most turns of an episode, by kind of task."""

SCIENCEWORLD_ETO = EpisodeProtocol(
    name="scienceworld-eto",
    system="You are in a small house with a laboratory and do an experiment there by text commands. Some commands: "
    "look around, examine OBJ, go to LOC, open OBJ, close OBJ, pick up OBJ, move OBJ to OBJ, use OBJ on OBJ, "
    "pour OBJ into OBJ, activate OBJ, focus on OBJ, wait1.",
    max_turns=100,
    max_turns_by_kind=ETO_MAX_TURNS,
)
"""Turn limits of the paper; kinds it leaves out have ScienceWorld's own 100.

The system text is ours, and there is no worked example in the prompt, so scores are not those of the paper."""

ETO_SPLITS = ("eto-train", "eto-dev", "eto-test")
"""Splits of the protocol."""


@cache
def _ranges() -> dict[str, dict[str, str]]:
    """Variations by split and kind, in ranges such as `0-2 5`."""
    read: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("eto.json").read_text())
    return read


def eto_variations(split: str) -> dict[str, list[int]]:
    """Variations of each kind of task in one of `ETO_SPLITS`, in rising order."""
    return {kind: _expand(ranges) for kind, ranges in _ranges()[split].items()}


def _expand(ranges: str) -> list[int]:
    numbers: list[int] = []
    for item in ranges.split():
        first, _, last = item.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
