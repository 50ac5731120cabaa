"""Contents of a run folder, read once for the report. Absent files are listed, not an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturn.data.run_files import (
    Confidences,
    Loss,
    Metrics,
    Reference,
    Stamp,
    parse_settings,
    read_note,
    read_notes,
    read_sides,
)
from perturn.data.seals import read_manifest, refuse_damage
from perturn.data.store import read_pairs, read_trajectories
from perturn.errors import RunError
from perturn.io.reading import read_text
from perturn.types import PreferencePair, Trajectory

Row = dict[str, Any]
"""One line of a metrics file."""

_EXPECTED = {
    "recipe.yaml": "the recipe",
    "manifest.json": "versions, counts and cost",
    "trajectories/expert.jsonl": "expert trajectories",
    "trajectories/explore.jsonl": "explored trajectories",
    "pairs.jsonl": "preference pairs",
    "metrics/sft.jsonl": "training curves of SFT",
    "metrics/align.jsonl": "training curves of the alignment",
    "metrics/confidence.jsonl": "confidence of each turn",
    "evaluation/base.jsonl": "evaluation of the base model",
    "evaluation/sft.jsonl": "evaluation of the SFT policy",
    "evaluation/protocol.json": "the protocol of the evaluation",
}


@dataclass(frozen=True)
class RecordedRun:
    """One run folder in memory."""

    path: Path
    recipe: str | None
    settings: Mapping[str, Any]
    """The recipe's settings."""
    pivot: float | None
    """The confidence above which a turn gets the low weight, as the recipe has it."""
    manifest: Mapping[str, Any]
    protocol: Mapping[str, Any] | None
    expert: list[Trajectory]
    explored: list[Trajectory]
    pairs: list[PreferencePair]
    confidence: list[Row]
    """One row a pair; empty if the file is absent or does not match the pairs."""
    sft: list[Row]
    align: list[Row]
    evaluation: dict[str, list[Trajectory]]
    """Trajectories of each policy: base, sft, then the aligned ones as the run evaluated them."""
    notes: list[str]
    """Missing files and contradictions, a sentence each."""
    reference: list[Row] = field(default_factory=list)
    """Reference log-probabilities of the tokens of each pair; empty if the file is absent or does not match."""
    loss: Mapping[str, Any] = field(default_factory=dict)
    """The loss of the alignment with its defaults."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Text of each token id that occurs."""

    @property
    def stages(self) -> Mapping[str, Mapping[str, Any]]:
        """Seconds, peak memory and counts of each stage."""
        stages: Mapping[str, Mapping[str, Any]] = self.manifest.get("stages") or {}
        return stages


def read_run(path: Path) -> RecordedRun:
    """Read a run folder.

    Args:
        path: The folder.

    Returns:
        All it holds, with a note on each part that is missing.

    Raises:
        RunError: The folder does not exist, holds nothing of a run, or a file in it is malformed.
    """
    if not path.is_dir():
        raise RunError(f"run folder {str(path)!r} does not exist. Give the folder that `perturn run` made.")
    manifest = read_manifest(path) or {}
    refuse_damage(path, _sealed(manifest))
    evaluation = _evaluation(path, manifest)
    notes = _missing(path, evaluation)
    if len(notes) == len(_EXPECTED) + 1:
        raise RunError(f"{str(path)!r} holds nothing of a run, such as manifest.json or evaluation/.")
    pairs = read_pairs(path / "pairs.jsonl") if (path / "pairs.jsonl").exists() else []
    file = path / "recipe.yaml"
    recipe = read_text(file, RunError) if file.exists() else None
    settings = parse_settings(recipe or "", str(file))
    loss = read_note(path / "metrics" / "loss.json", Loss) or {}
    confidence = read_sides(path / "metrics" / "confidence.jsonl", Confidences)
    if confidence and len(confidence) != len(pairs):
        notes.append(
            f"metrics/confidence.jsonl has {len(confidence)} rows and pairs.jsonl {len(pairs)}; "
            "confidences are left out. Run the alignment again to write them anew."
        )
        confidence = []
    reference = read_sides(path / "metrics" / "reference.jsonl", Reference)
    return RecordedRun(
        path=path,
        recipe=recipe,
        settings=settings,
        pivot=_pivot(settings, loss),
        loss=loss,
        manifest=manifest,
        protocol=read_note(path / "evaluation" / "protocol.json", Stamp),
        expert=_trajectories(path / "trajectories" / "expert.jsonl"),
        explored=_trajectories(path / "trajectories" / "explore.jsonl"),
        pairs=pairs,
        confidence=confidence,
        sft=read_notes(path / "metrics" / "sft.jsonl", Metrics),
        align=read_notes(path / "metrics" / "align.jsonl", Metrics),
        evaluation=evaluation,
        notes=notes + _panel_notes(evaluation),
        reference=reference if len(reference) == len(pairs) else [],
        texts=read_note(path / "tokens.json", dict[str, str]) or {},
    )


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Seals of the files that a report reads and that no running stage may be writing."""
    files: Mapping[str, Mapping[str, Any]] = manifest.get("files") or {}
    return {file: one for file, one in files.items() if one["stage"] and not file.startswith("checkpoints/")}


def aligned_policy(evaluation: Mapping[str, Sequence[Trajectory]]) -> str | None:
    """The last policy that was evaluated, if it is one beyond base and SFT."""
    aligned = [name for name in evaluation if name not in ("base", "sft")]
    return aligned[-1] if aligned else None


def _evaluation(path: Path, manifest: Mapping[str, Any]) -> dict[str, list[Trajectory]]:
    """Evaluated policies: base, sft, then in the order of the manifest's stages, then by name."""
    stages = [stage.removeprefix("evaluate-") for stage in manifest.get("stages") or {}]
    order = ["base", "sft", *(stage for stage in stages if stage not in ("base", "sft"))]
    files = {file.stem: file for file in sorted((path / "evaluation").glob("*.jsonl"))}
    names = [name for name in order if name in files] + [name for name in files if name not in order]
    evaluation = {name: _trajectories(files[name]) for name in names}
    return {name: trajectories for name, trajectories in evaluation.items() if trajectories}


def _missing(path: Path, evaluation: Mapping[str, list[Trajectory]]) -> list[str]:
    notes = [
        f"This run has no {what} ({name})."
        for name, what in _EXPECTED.items()
        if not (path / name).exists() or (path / name).stat().st_size == 0
    ]
    if aligned_policy(evaluation) is None:
        notes.append("This run has no evaluation of an aligned policy (evaluation/<loss>.jsonl).")
    return notes


def _panel_notes(evaluation: Mapping[str, list[Trajectory]]) -> list[str]:
    panels = {frozenset(item.task.id for item in trajectories) for trajectories in evaluation.values()}
    if len(panels) < 2:
        return []
    return ["The policies were not evaluated on the same tasks; only the paired comparison allows for that."]


def _trajectories(path: Path) -> list[Trajectory]:
    """In one order, whatever the order in which they ended, so that resampling draws the same."""
    return sorted(read_trajectories(path), key=lambda one: one.key) if path.exists() else []


def _pivot(settings: Mapping[str, Any], loss: Mapping[str, Any]) -> float | None:
    pivot = loss.get("pivot", _find(settings, "pivot"))
    return float(pivot) if isinstance(pivot, int | float) else None


def _find(settings: Any, key: str) -> Any:
    """First value of a key at any depth of the recipe, or None."""
    if not isinstance(settings, Mapping):
        return None
    if key in settings:
        return settings[key]
    return next(
        (value for value in (_find(part, key) for part in settings.values()) if value is not None), None
    )
