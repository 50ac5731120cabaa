"""Where training's metrics can go beside the run folder, and whether it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from perturn.errors import ConfigError, did_you_mean

TRACKERS = ("tensorboard", "trackio", "wandb")


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker that is unknown or not installed.

    Raises:
        ConfigError: Saying what to install.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown report_to {name!r}.{did_you_mean(name, TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'report_to: {name} is not installed; run: pip install "perturn[{name}]"')
