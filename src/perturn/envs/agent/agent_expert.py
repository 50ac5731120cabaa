"""The expert of environment `agent`: a stronger model behind an API that answers the same agent program."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from perturn.config.parsing import build
from perturn.engines import ENGINES, Serving
from perturn.episodes.engine_abilities import EngineAbilities, abilities_of
from perturn.episodes.episode import Episode
from perturn.errors import ConfigError, EngineFailure, check_type, within
from perturn.rules import Sampling
from perturn.types import Engine, Trajectory

_open: dict[str, tuple[Engine, int]] = {}
"""Key of settings and folder -> (engine, number of experts that share the engine, its cost record and its budget)."""
_lock = threading.Lock()
_OWN = ("model", "temperature", "top_p", "max_new_tokens")
"""Settings that the engine does not know: the model and the sampling."""


class Expert:
    """A model behind an API that plays expert episodes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check the settings without sending a request.

        Args:
            settings: `model`, sampling settings such as `temperature`, and the settings of engine `api`.

        Raises:
            ConfigError: If a setting is wrong.
        """
        check_type(
            "environment.expert.model", settings.get("model"), str, "the name of a model at its server"
        )
        section = {"name": "api", **{key: each for key, each in settings.items() if key not in _OWN}}
        self._settings = build(ENGINES, section, "environment.expert")
        if self._settings.traits.serves_checkpoints:
            _no_weights()
        self._model = str(settings["model"])
        decoding = {key: settings[key] for key in _OWN[1:] if key in settings}
        with within("environment.expert: ", TypeError):
            self._sampling = Sampling(**{"max_new_tokens": 1024, **decoding})
        self._section = json.dumps([self._model, section], sort_keys=True, default=str)
        self._key: str | None = None

    def play(self, begin: Callable[[EngineAbilities], Episode], folder: Path | None) -> Trajectory:
        """Play an episode with the expert's answers and return its trajectory.

        Args:
            begin: Function that starts the episode for an engine with these abilities, and returns its generator.
            folder: Folder that caches paid answers; None: cache in memory.
        """
        engine = self._opened(folder)
        steps = begin(abilities_of(engine))
        try:
            prompt = next(steps)
            while True:
                (answer,) = engine.generate([prompt], self._sampling)
                prompt = steps.throw(answer) if isinstance(answer, EngineFailure) else steps.send(answer)
        except StopIteration as end:
            played: Trajectory = end.value
        finally:
            steps.close()
        return played

    def close(self) -> None:
        """Close the engine's connections, unless another expert still uses the engine."""
        with _lock:
            key, self._key = self._key, None
            if key is None:
                return
            engine, users = _open.pop(key)
            if users > 1:
                _open[key] = engine, users - 1
            else:
                engine.close()

    def _opened(self, folder: Path | None) -> Engine:
        with _lock:
            if self._key is None:
                key = f"{folder} {self._section}"
                if key not in _open:
                    serving = Serving("expert", self._model, (), _no_weights, folder)
                    _open[key] = self._settings.open(serving), 0
                engine, users = _open[key]
                _open[key], self._key = (engine, users + 1), key
            return _open[self._key][0]


def _no_weights() -> NoReturn:
    raise ConfigError("environment.expert must be a model behind an API (name: api).")
