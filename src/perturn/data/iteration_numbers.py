"""Figures of an iteration: how its episodes were used, and metrics of its training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from perturn.config.row_maker_settings import BESIDE, FATES, UNITS
from perturn.data.group_account import BINS

_GROUPS = ("groups", "alone", "equal_outcomes", "zero_credit")
"""Names of the counts of groups in the result of `perturn.data.group_account.counts_of`."""
_ACCOUNTS = ("credit", "pair", "outcomes")
"""Stages that record how explored episodes were used. A run has one of these stages."""
STAGES = ("explore", "branch", "prefer", "reward", *_ACCOUNTS, "align")
"""Stages of an iteration, in order."""


def account_of(notes: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the counts that record how explored episodes were used; empty until their stage is done.

    Args:
        notes: The manifest's records of an iteration's stages, by name.
    """
    return next((found for name in _ACCOUNTS if (found := notes[name].get("counts"))), {})


def seconds_of(stages: Mapping[str, Mapping[str, Any]], mark: str) -> float:
    """Return the time spent in the stages of an iteration in seconds, including the evaluation of its policy.

    Args:
        stages: Stages in the manifest.
        mark: End of the names of the iteration's stages, such as `-003`. Empty for a recipe without iterations, whose
            evaluations are not counted.
    """
    own = (note for name, note in stages.items() if (name.endswith(mark) if mark else name in STAGES))
    return sum(float((note or {}).get("seconds") or 0) for note in own)


def ledger_of(noted: Mapping[str, Any], explored: int) -> dict[str, Any] | None:
    """Return how the episodes of an iteration were used, from the counts of the stage credit, pair or outcomes.

    Args:
        noted: Counts of the stage, from the manifest.
        explored: Number of explored episodes, which the counts of pairs and outcomes lack.

    Returns:
        A dictionary, or None if nothing was counted. `asked`: the total; `bins`: counts that sum to `asked`; `groups`:
        counts of groups, for a credit; `unit`: the counted unit. The unit is one of four. `episodes`: each episode
        counts once. `memberships`: an episode counts once for each turn at which it branches. `steps`: parts of an
        episode from one branching turn to the next. `nodes`: nodes of trees at which several different actions were
        taken.
    """
    counts = {name: int(n) for name, n in noted.items() if isinstance(n, int) and n >= 0}
    if "asked" in counts:
        groups = {name: counts[name] for name in _GROUPS if name in counts}
        bins = {name: counts.get(name, 0) for name in BINS}
        return {"asked": counts["asked"], "bins": bins, "groups": groups, "unit": "episodes"}
    for unit in UNITS:
        if unit in counts:
            asked = counts.pop(unit)
            return {"asked": asked, "bins": counts, "groups": {}, "unit": unit}
    if "taught" in counts:
        if "corrections" in counts and "corrections_too_long" not in counts:
            counts.pop("too_long", None)  # an earlier version counted too long corrections there
        bins = {name: counts.get(name, 0) for name in FATES}
    elif "kept" in counts:
        bins = {name: n for name, n in counts.items() if not name.startswith(BESIDE)}
    else:
        return None
    return {"asked": explored or sum(bins.values()), "bins": bins, "groups": {}, "unit": "episodes"}


def training_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of logged metrics over an iteration's optimizer steps. `rows` has a row for each step.

    A metric that was not logged is None.
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
        "mismatch": _mean(rows[:1], "behavior_kl"),  # before any update
    }


def _mean(rows: Iterable[Mapping[str, Any]], key: str) -> float | None:
    values = [float(row[key]) for row in rows if is_number(row.get(key))]
    mean = sum(values) / len(values) if values else None
    return mean if is_number(mean) else None


def is_number(value: Any) -> bool:
    """Return whether a logged value is a finite number; a whole number must also fit into a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
