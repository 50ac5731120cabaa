"""Handle Ctrl-C during training: write a checkpoint, then stop."""

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
    """Trainer callback: Ctrl-C or SIGTERM ends training after a checkpoint; a second signal ends it at once.

    Training runs in a `with` block of the callback, which raises a `KeyboardInterrupt` after the checkpoint. Signal
    handlers that other code has set are not replaced. Outside the main thread, no handler is replaced.
    """

    def __init__(self, say: Callable[[str], None], also: Callable[[], bool] = lambda: False) -> None:
        """Create the callback.

        Args:
            say: Function that shows a notice about the signal. A signal handler calls this function.
            also: Function that returns whether another process, such as the driver, has asked this process to stop.
        """
        self._say, self._also = say, also
        self.asked = False
        """Whether a signal has arrived."""

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
        """Save a checkpoint and stop in every process, if one of the processes was told to stop."""
        self.asked |= self._also()
        if any_of(self.asked):
            control.should_save = control.should_training_stop = True
