"""Measure the advantage of recorded turns by continuations of their episodes, and score credits against it."""
