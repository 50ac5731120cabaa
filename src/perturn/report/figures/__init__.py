"""The report's plotly figures: plain data in, a figure out, or the sentence that stands in its place."""

from perturn.report.figures.base import is_number, theme
from perturn.report.figures.curves import Chart, metric_lines
from perturn.report.figures.scores import score_by_kind, success_by_length, task_differences
from perturn.report.figures.turns import confidence_bars, confidence_spread, values_by_turn

__all__ = [
    "Chart",
    "confidence_bars",
    "confidence_spread",
    "is_number",
    "metric_lines",
    "score_by_kind",
    "success_by_length",
    "task_differences",
    "theme",
    "values_by_turn",
]
