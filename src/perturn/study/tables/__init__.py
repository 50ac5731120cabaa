"""Verdicts of a study: its records, comparisons, tables, figures and page."""
