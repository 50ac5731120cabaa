"""Ctrl-C in the middle of training: nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from perturn.train_processes import any_of

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


class Stopping(TrainerCallback):
    """Within, Ctrl-C or SIGTERM ends training after a checkpoint of the step under way; a second one ends it at once.

    At its end that is a `KeyboardInterrupt`. Handlers of others stay, and all of them outside the main thread.
    """

    def __init__(self, say: Callable[[str], None], also: Callable[[], bool] = lambda: False) -> None:
        """Wait for a signal.

        Args:
            say: Tells the user that the signal has come; it is called between two instructions of any code.
            also: Whether another process has asked for the end, such as the driver of this process.
        """
        self._say, self._also = say, also
        self.asked = False
        """Whether the signal has come."""

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._ours = [each for each, usual in _DEFAULTS.items() if signal.getsignal(each) is usual]
        else:
            self._ours = []
        for each in self._ours:
            signal.signal(each, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        signal.signal(number, _DEFAULTS[signal.Signals(number)])
        self.asked = True
        self._say("stopping after this step, Ctrl-C again: at once")

    def __exit__(self, kind: object, *_: object) -> None:
        for each in self._ours:
            signal.signal(each, _DEFAULTS[each])
        if kind is None and any_of(self.asked):
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the checkpoint in every process, if one of them was told to stop."""
        self.asked |= self._also()
        if any_of(self.asked):
            control.should_save = control.should_training_stop = True
