"""Numbers of an iteration: where its episodes ended, and metrics of its training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from perturn.data.group_account import BINS

_GROUPS = ("groups", "alone", "equal_outcomes", "zero_credit")
"""Counts of groups besides the bins, as in `data.groups.counts_of`."""
_BESIDE = ("cut", "steps_")
"""How counts of the pair stage begin that are of kept episodes, or of the expert's steps, and no bin."""
FATES = ("failed", "no_turns", "repeated", "success", "failure")
"""Fates of an explored trajectory that is learned from by how it ended: the first that holds. `repeated`: its actions
are those, on that task, of an earlier trajectory, or of the expert where the way takes that episode of the expert."""
_ACCOUNTS = ("credit", "pair", "outcomes")
"""Stages that record where explored episodes ended; a run has one of them."""
STAGES = ("explore", "branch", "prefer", "reward", *_ACCOUNTS, "align")
"""Stages of an iteration."""


def account_of(notes: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return counts of the stage that records where explored episodes ended; empty before it is done.

    Args:
        notes: What the manifest has of an iteration's stages, by name.
    """
    return next((found for name in _ACCOUNTS if (found := notes[name].get("counts"))), {})


def ledger_of(noted: Mapping[str, Any], explored: int) -> dict[str, Any] | None:
    """Return where each episode that was asked for ended: by the account of a credit, of pairs, or of outcomes.

    Args:
        noted: Counts of the stage.
        explored: Episodes that were explored, which pairs and outcomes do not count.

    Returns:
        `asked`, `bins` (which sum to it) and `groups` (counts of groups, for a credit); `unit`: both count `episodes`,
        or `memberships`, where pairs share their first turns: an explored episode is in a group for each turn that it
        branches at; `steps` of explored episodes, from one branching turn to the next; or `nodes`, of trees, that
        were left by different steps. None if nothing was counted.
    """
    counts = {name: int(n) for name, n in noted.items() if isinstance(n, int) and n >= 0}
    if "asked" in counts:
        groups = {name: counts[name] for name in _GROUPS if name in counts}
        bins = {name: counts.get(name, 0) for name in BINS}
        return {"asked": counts["asked"], "bins": bins, "groups": groups, "unit": "episodes"}
    for unit in ("memberships", "steps", "nodes"):
        if unit in counts:
            asked = counts.pop(unit)
            return {"asked": asked, "bins": counts, "groups": {}, "unit": unit}
    if "taught" in counts:
        bins = {name: counts.get(name, 0) for name in FATES}
    elif "kept" in counts:
        bins = {name: n for name, n in counts.items() if not name.startswith(_BESIDE)}
    else:
        return None
    return {"asked": explored or sum(bins.values()), "bins": bins, "groups": {}, "unit": "episodes"}


def training_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means of the logged metrics over an iteration's optimizer steps, a row per step.

    None for metrics that were not logged.
    """
    entropies = [_mean(rows, f"entropy/{side}") for side in ("chosen", "rejected")]
    found = [value for value in entropies if value is not None]
    return {
        "steps": len(rows),
        "loss": _mean(rows, "loss"),
        "grad_norm": _mean(rows, "grad_norm"),
        "entropy": fmean(found) if found else None,
        "kl": _mean(rows, "kl/turns"),
        "clip_share": _mean(rows, "clip_share"),
        "mismatch": _mean(rows[:1], "behavior_kl"),  # nothing has moved yet
    }


def _mean(rows: Iterable[Mapping[str, Any]], key: str) -> float | None:
    values = [float(row[key]) for row in rows if is_number(row.get(key))]
    mean = sum(values) / len(values) if values else None
    return mean if is_number(mean) else None


def is_number(value: Any) -> bool:
    """Return whether a logged value is a finite number; a whole number beyond the range of a float is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
