"""Watch a run from another process: what it does, how fast, for how long still, and what looks wrong. Only reads."""

from perturn.watch.screen import ledger, rate, render, sparkline, watch_live
from perturn.watch.state import Stage, State, Watcher

__all__ = ["Stage", "State", "Watcher", "ledger", "rate", "render", "sparkline", "watch_live"]
