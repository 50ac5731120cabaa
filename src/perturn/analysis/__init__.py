"""Compute the numbers of a run from its folder, for the report, `watch` and the audit."""
