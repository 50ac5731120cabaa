"""Estimates for `--dry-run`: time and memory of each stage."""
