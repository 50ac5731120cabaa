"""Watch a run from another process: what it does, how fast, for how long still, and what looks wrong. Only reads."""

from perturn.watch.run_state import Stage, State, Watcher
from perturn.watch.watch_screen import ledger, rate, render, sparkline, watch_live

__all__ = ["Stage", "State", "Watcher", "ledger", "rate", "render", "sparkline", "watch_live"]
