"""Watch a run from another process: its stages, speed, time left, and alarms. Watching never writes to the run."""

from perturn.watch.run_state import Stage, State, Watcher
from perturn.watch.watch_screen import ledger, rate, render, sparkline, watch_live

__all__ = ["Stage", "State", "Watcher", "ledger", "rate", "render", "sparkline", "watch_live"]
