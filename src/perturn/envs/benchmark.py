"""Helpers that the benchmarks share: checks of settings and of installed packages, hashes, and example dialogues."""

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
    """Return a name unchanged if it is a known name.

    Args:
        what: Word for the named thing in the error message, such as `split`.
        name: The name.
        known: All known names.
        environment: Name of the environment, for the error message.

    Raises:
        ConfigError: If the name is unknown.
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
    """Return the chosen kinds of tasks without duplicates, in alphabetical order; an empty choice means all kinds.

    Args:
        kinds: Names of the chosen kinds.
        known: Names of all kinds.
        environment: Name of the environment, for the error message.
        what: Word for a kind in the error message.
        setting: Name of the setting, for the error message.

    Raises:
        ConfigError: If a kind is unknown, or the value is not a list of names.
    """
    fits = isinstance(kinds, list | tuple) and all(isinstance(kind, str) for kind in kinds)
    remedy = f"Write [{kinds}]." if isinstance(kinds, str) else ""
    check_fit(fits, setting, "be a list of names", kinds, remedy)
    return tuple(sorted({check_known(what, kind, known, environment) for kind in kinds})) or tuple(known)


def check_installed(environment: str, extra: str, modules: Sequence[str], *, remark: str = "") -> None:
    """Check that the modules of an optional dependency of Perturn can be imported.

    Raises:
        EnvironmentFailure: If a module is missing. The message has the `pip install` command.
    """
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        raise EnvironmentFailure(
            f'{environment} needs the package {error.name}: pip install "perturn[{extra}]"{remark}.'
        ) from error


def short_hash(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256 hash, for example to compare states."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def worked_example(dialogue: Sequence[tuple[str, str, str]]) -> tuple[Message, ...]:
    """Convert a dialogue of (observation, thought, action) triples to chat messages in the format `react`."""
    return tuple(
        message
        for observation, thought, action in dialogue
        for message in (
            {"role": "user", "content": observation},
            {"role": "assistant", "content": FORMATS["react"].write(thought, action)},
        )
    )
