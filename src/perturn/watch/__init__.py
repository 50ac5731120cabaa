"""Watch a run from another process: its stage, its speed, the time left, and alarms. Only reads."""

from perturn.watch.run_state import Stage, State, Watcher
from perturn.watch.watch_screen import ledger, rate, render, sparkline, watch_live

__all__ = ["Stage", "State", "Watcher", "ledger", "rate", "render", "sparkline", "watch_live"]
