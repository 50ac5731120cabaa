"""Judges: models that rate texts, on any engine."""
