"""Rules that an environment declares: each setting of its protocol, and where the setting comes from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from perturn.config.sections import ProtocolSettings
from perturn.envs.async_worlds import AwaitedWorld
from perturn.envs.user_environment import OwnWorld, attribute
from perturn.errors import ConfigError
from perturn.io.plain_data import mismatch
from perturn.traits import traits_of
from perturn.types import EpisodeProtocol

_ATTRIBUTES = {"format": str, "max_turns": int, "system": str}
"""Settings of a protocol that a class may have as attributes of its own, and their types."""
_EXPECTED = {str: "text", int: "a whole number"}
_SECTION = re.compile(
    r"\n\s*(Args|Attributes|Examples?|Notes?|Raises|Returns|See Also|Todo|Usage)s?:?\s*\n", re.IGNORECASE
)
"""Where a docstring turns from the game to its code."""

Declared = dict[str, tuple[Any, str]]
"""Setting of a protocol -> its value, and where the value comes from."""


def declared_rules(env: Any) -> Declared:
    """Return the settings of a protocol that an environment declares.

    Of each setting the first that is there counts: the attribute of that name, the class's `protocol` (a name, an
    `EpisodeProtocol` or a dict of settings), and for `system` the docstring of the user's class.

    Raises:
        ConfigError: If the class's `protocol` is something else, or an attribute is a value of another type.
    """
    found: Declared = {}
    for one in reversed(_layers(env)):
        label = type(one).__name__
        protocol = traits_of(one).protocol or attribute(one, "protocol")
        found |= {key: (value, f"protocol of {label}") for key, value in _settings(protocol, label).items()}
        for key, kind in _ATTRIBUTES.items():
            value = attribute(one, key)
            if isinstance(value, kind) and not isinstance(value, bool):
                found[key] = (value, f"{key} of {label}")
            elif isinstance(value, str | int | float):
                raise ConfigError(f"{key} of {label}: {mismatch(_EXPECTED[kind], value)}. Correct it.")
        if "system" not in found and "name" not in found and (text := _docstring(type(one))):
            found["system"] = (text, f"docstring of {label}")
    return found


def _layers(env: Any) -> list[Any]:
    """The user's object, and the adapters around it, from within."""
    while isinstance(env, AwaitedWorld | OwnWorld):
        env = env.played
    inner = env.played if traits_of(env).adapts else None
    return [env] if inner is None else [inner, env]


def _settings(protocol: Any, label: str) -> dict[str, Any]:
    """The settings of a class's `protocol`."""
    if protocol is None:
        return {}
    if isinstance(protocol, str):
        return {"name": protocol}
    if isinstance(protocol, EpisodeProtocol):
        if protocol.max_turns_by_kind or protocol.sampling or protocol.turns:
            raise ConfigError(
                f"protocol of {label} has max_turns_by_kind, sampling or turns, which only a named protocol has; "
                'register it as an entry point "perturn.protocols" and set the attribute to its name.'
            )
        given = {each.name: getattr(protocol, each.name) for each in fields(ProtocolSettings)}
        whole = {"history": "full" if protocol.history is None else protocol.history}
        return given | whole | {"example": list(protocol.example)}
    if isinstance(protocol, Mapping):
        return dict(protocol)
    raise ConfigError(
        f"protocol of {label} must be the name of a protocol, a dict of its settings or an EpisodeProtocol, got "
        f"{protocol!r:.80}."
    )


def _docstring(kind: type) -> str:
    """The part of the docstring of a user's class that is on the game; empty where there is none."""
    text = kind.__dict__.get("__doc__") or ""
    if kind.__module__.partition(".")[0] == "perturn" or text.startswith(f"{kind.__name__}("):
        return ""  # an adapter of ours, or what a dataclass writes by itself
    return _SECTION.split(f"{inspect.cleandoc(text)}\n", maxsplit=1)[0].strip()
