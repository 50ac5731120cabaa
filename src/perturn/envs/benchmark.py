"""Parts that the benchmarks share: settings that name one of several things, installation checks, texts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from importlib import import_module

from perturn.episodes.formats import FORMATS
from perturn.errors import EnvironmentFailure, check_fit
from perturn.errors import check_known as check_listed
from perturn.types import Message

NO_EPISODE = "No episode is running: call reset(task, seed) before step, and after an end."


def check_known(what: str, name: str, known: Collection[str], environment: str) -> str:
    """Return a name, if it is a known one.

    Args:
        what: The kind of thing it names, such as `split`.
        name: The name.
        known: The names there are.
        environment: Who knows them.

    Raises:
        ConfigError: If it is not.
    """
    check_listed(name, known, f"Unknown {what} {name!r} of {environment}")
    return name


def choose_kinds(
    kinds: Sequence[str],
    known: Sequence[str],
    environment: str,
    *,
    what: str = "kind",
    setting: str = "kinds",
) -> tuple[str, ...]:
    """Return the kinds asked for, each once and in alphabetical order; all known ones if none is named.

    Args:
        kinds: Their names.
        known: The names there are.
        environment: Who knows them.
        what: The kind of thing that a name refers to.
        setting: Which setting names them.

    Raises:
        ConfigError: If there is no such kind, or the value is not a list of names.
    """
    fits = isinstance(kinds, list | tuple) and all(isinstance(kind, str) for kind in kinds)
    remedy = f"Write [{kinds}]." if isinstance(kinds, str) else ""
    check_fit(fits, setting, "be a list of names", kinds, remedy)
    return tuple(sorted({check_known(what, kind, known, environment) for kind in kinds})) or tuple(known)


def check_installed(environment: str, extra: str, modules: Sequence[str], *, remark: str = "") -> None:
    """Reject to go on without the modules that an extra of Perturn brings."""
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        raise EnvironmentFailure(
            f'{environment} needs the package {error.name}: pip install "perturn[{extra}]"{remark}.'
        ) from error


def short_hash(text: str) -> str:
    """Return a hash of a text, such as the description of a state, as 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def worked_example(dialogue: Sequence[tuple[str, str, str]]) -> tuple[Message, ...]:
    """Turn (observation, thought, action) of each turn into messages in the format `react`."""
    return tuple(
        message
        for observation, thought, action in dialogue
        for message in (
            {"role": "user", "content": observation},
            {"role": "assistant", "content": FORMATS["react"].write(thought, action)},
        )
    )
