"""The engine of an environment's judge, which all worlds of a process share: a server of chat completions."""

from __future__ import annotations

import atexit
import json
from functools import cache

from perturn.engines.api.settings import ApiSettings
from perturn.table import require_library
from perturn.types import Engine


@cache
def open_engine(model: str, server: str, reader: str) -> Engine:
    """Return the engine that asks a judge; all worlds of a process share it, with its pace, budget and answers.

    Args:
        model: Name of the model at the server.
        server: `ApiSettings` as JSON.
        reader: Whose judge it is, for messages.

    Raises:
        ConfigError: If the key or the package `openai` is missing.
    """
    require_library("openai", reader, "api")
    from perturn.engines.api.engine import ApiEngine

    engine = ApiEngine(model, ApiSettings(**json.loads(server)))
    atexit.register(engine.close)
    return engine
