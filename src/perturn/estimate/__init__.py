"""Estimates for `--dry-run`: time and memory of each stage of a run."""
