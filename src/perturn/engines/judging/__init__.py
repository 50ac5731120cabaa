"""Judges: models that rate texts, behind any engine."""
