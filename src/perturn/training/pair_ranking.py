"""Ranking accuracy of a policy on its training pairs, before and after training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturn.config.recipe import Recipe
from perturn.policy.packing import Examples
from perturn.training.turn_trainer import TurnTrainer

MOST = 256
"""Largest number of pairs that are ranked after training."""


@dataclass(frozen=True)
class Ranking:
    """Share of pairs whose chosen side is more likely than the rejected side, for one set of pairs."""

    pairs: int
    """Number of pairs."""
    before: float | None
    """Share before training; None: not known."""
    after: float
    """Share after training."""

    def __str__(self) -> str:
        before = "" if self.before is None else f"{100 * self.before:.1f} % before training, "
        said = f"ranking accuracy on the {self.pairs} training pairs: {before}{100 * self.after:.1f} % after training"
        return (
            said
            if self.after >= 0.5
            else f"{said} (log-probabilities are sums, so a longer side is less likely)"
        )


def ranked(recipe: Recipe, section: str, needs_rejected: bool, rows: int) -> int:
    """Return the number of pairs that a training ranks at its end; 0 if its pass would be repeated or paid.

    Args:
        recipe: Recipe of the run.
        section: Section of the training, such as `align`.
        needs_rejected: Whether the loss reads both sides of pairs.
        rows: Number of training rows.
    """
    once = section == "align" and recipe.iterations == 1 and recipe.backend["name"] == "local"
    return len(range(0, rows, math.ceil(rows / MOST))) if once and needs_rejected and rows else 0


def ranking(trainer: TurnTrainer, *, starts_as_reference: bool) -> Ranking:
    """Return the ranking accuracy of a trained policy on its pairs.

    It costs one forward pass over at most 256 pairs, which are evenly spaced in the training data. All processes must
    call this. The share before training comes from the reference log-probabilities, and costs nothing.

    Source: as `logps/accuracies` of `perturn.training.trainer_evaluation.row_metrics`.

    Args:
        trainer: The trainer, after training with a loss that reads both sides.
        starts_as_reference: Whether the policy before training was the reference.
    """
    assert isinstance(trainer.train_dataset, Examples)
    rows = trainer.train_dataset.rows
    kept = rows[:: math.ceil(len(rows) / MOST)]
    before = None
    if starts_as_reference and trainer.needs_reference:
        sums = [[float(side.sum()) for side in row.reference] for row in kept]
        before = sum(chosen > rejected for chosen, rejected in sums) / len(kept)
    found: Any = trainer.predict(Examples(kept)).predictions
    assert isinstance(found, dict)
    return Ranking(len(kept), before, float(np.mean(found["logps/accuracies"])))
