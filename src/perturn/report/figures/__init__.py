"""Plotly figures of the report. Each function takes plain data, and returns a figure or a sentence instead of one."""

from perturn.report.figures.base import theme
from perturn.report.figures.iteration_figures import Curve, Line, iteration_curve, learning_curve, ledger_bars
from perturn.report.figures.score_figures import (
    errors_by_turn,
    passes_by_episodes,
    score_by_kind,
    success_by_length,
    task_differences,
)
from perturn.report.figures.training_curves import Chart, metric_lines
from perturn.report.figures.turn_figures import confidence_bars, confidence_spread, group_map, values_by_turn

__all__ = [
    "Chart",
    "Curve",
    "Line",
    "confidence_bars",
    "confidence_spread",
    "errors_by_turn",
    "group_map",
    "iteration_curve",
    "learning_curve",
    "ledger_bars",
    "metric_lines",
    "passes_by_episodes",
    "score_by_kind",
    "success_by_length",
    "task_differences",
    "theme",
    "values_by_turn",
]
