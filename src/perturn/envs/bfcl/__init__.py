"""BFCL's multi-turn tasks with native tool calls."""
