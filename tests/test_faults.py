"""Worlds that cannot say their name or close are no reason for a traceback."""

import asyncio
import logging

import pytest

from perturn.envs.load import environment_maker
from perturn.errors import EnvironmentFailure


class Unkind(Exception):
    """Its text is another exception."""

    def __str__(self):
        raise ValueError("no text")


class Anonymous:
    """Its name raises."""

    @property
    def name(self):
        """There is none."""
        raise Unkind

    def close(self):
        """Nothing is held."""


class Stuck(Anonymous):
    """Its close raises what is in `error`."""

    name = "stuck-1.0"
    error = Unkind()

    def close(self):
        """Raise."""
        raise self.error


def test_a_world_whose_name_raises_cannot_start():
    with pytest.raises(EnvironmentFailure, match=r"Anonymous' cannot start: Unkind: \(no text: ValueError\)"):
        environment_maker({"name": f"{__name__}:Anonymous"})


@pytest.mark.parametrize("error", [Unkind(), SystemExit(1), asyncio.CancelledError()])
def test_a_world_that_cannot_close_stops_nothing(error, monkeypatch, caplog):
    """It is closed once before the work, where `sys.exit` ended the command without a word."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Stuck, "error", error)

    environment_maker({"name": f"{__name__}:Stuck"})

    assert f"a world could not be closed: {type(error).__name__}: " in caplog.text
