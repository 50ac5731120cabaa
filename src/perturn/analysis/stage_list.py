"""The stages of a run as the page lists them: those of several iterations together."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from perturn.data.iteration_numbers import is_number
from perturn.data.run_paths import iteration_of


def by_stem(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Stages with one row for all iterations of each.

    Args:
        stages: As the manifest has them.

    Returns:
        Row by name, such as `explore, 60 times`: `seconds` and `counts` are sums, `peak_memory_gb` is the highest. Of
        shares and means among the counts, which are no whole numbers, it is the mean over those that have one. A text
        stands where it is the same in all.
    """
    together: dict[str, list[str]] = {}
    for name in stages:
        stem = name if iteration_of(name) is None else name.rpartition("-")[0]
        together.setdefault(stem, []).append(name)
    return {
        names[0] if len(names) == 1 else f"{stem}, {len(names)} times": _sum([stages[name] for name in names])
        for stem, names in together.items()
    }


def _sum(notes: list[Mapping[str, Any]]) -> dict[str, Any]:
    if len(notes) == 1:
        return {
            "seconds": notes[0].get("seconds"),
            "peak_memory_gb": notes[0].get("peak_memory_gb"),
            "counts": notes[0].get("counts") or {},
        }
    counts: dict[str, Any] = {}
    means: dict[str, list[float]] = {}
    for note in notes:
        for key, value in (note.get("counts") or {}).items():
            if isinstance(value, float) and is_number(value):
                means.setdefault(key, []).append(value)
                counts[key] = mean(means[key])
            elif is_number(value):
                counts[key] = counts.get(key, 0) + value
            elif all((each.get("counts") or {}).get(key) == value for each in notes):
                counts[key] = value
    return {
        "seconds": sum(float(note.get("seconds") or 0) for note in notes),
        "peak_memory_gb": max(float(note.get("peak_memory_gb") or 0) for note in notes),
        "counts": counts,
    }
