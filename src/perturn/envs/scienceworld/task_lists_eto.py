"""The ETO protocol on ScienceWorld: task lists and turn limits (`eto.json`), in the names of ScienceWorld 1.2.3.

Source: the index lists published with Song et al. 2024, "Trial and Error: Exploration-Based Trajectory
Optimization for LLM Agents", arXiv:2403.02502. Differs: kept as sorted ranges; "mendellian" and the
`task-3-` prefixes are dropped from names.

The counts are 1483 / 194 / 211 (the paper prints 241 test tasks). `eto-train` reaches into ScienceWorld's
own dev range, and 54 of its tasks are in `eto-dev` too; `eto-test` shares no task with the other two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perturn.types import EpisodeProtocol

_PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("eto.json").read_text(encoding="utf-8"))

ETO_MAX_TURNS: dict[str, int] = _PUBLISHED["max_turns"]
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

_RANGES: dict[str, dict[str, str]] = _PUBLISHED["variations"]
"""Ranges such as `0-2 5` by split and kind."""

ETO_SPLITS: tuple[str, ...] = tuple(_RANGES)
"""Splits of the protocol."""


def eto_variations(split: str) -> dict[str, list[int]]:
    """Variations of each kind of task in one of `ETO_SPLITS`, in rising order."""
    return {kind: _expand(ranges) for kind, ranges in _RANGES[split].items()}


def _expand(ranges: str) -> list[int]:
    numbers: list[int] = []
    for item in ranges.split():
        first, _, last = item.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
