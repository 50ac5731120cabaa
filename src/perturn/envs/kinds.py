"""The setting `kinds` of environments whose tasks are of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

from perturn.errors import ConfigError, did_you_mean


def choose_kinds(kinds: Sequence[str], known: Sequence[str], environment: str) -> tuple[str, ...]:
    """The kinds asked for, each once and in alphabetical order; all known ones if none is named.

    Raises:
        ConfigError: If there is no such kind.
    """
    if isinstance(kinds, str):
        raise ConfigError(f"kinds must be a list of names, got the text {kinds!r}: write [{kinds}].")
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"Unknown kind {kind!r} of {environment}.{did_you_mean(kind, known)}")
    return tuple(sorted(set(kinds))) or tuple(known)
