"""Verdicts of a study: records, comparisons, tables, figures and the page."""
