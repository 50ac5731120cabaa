"""Execution of a run: its checks, its session with engine and environments, and its stages."""
