"""The errors users meet. Each message names the place, the expected value, the value found, and the remedy."""

import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

MOST_REFUSED = 1000
"""Bad rows after which the rest of a dataset is not looked at."""
_SHOWN = 3
"""Reasons to refuse rows that a message has, and rows that it names for each."""
_VARIES = re.compile(r"'[^']*'|\d+")
"""The parts of a reason that depend on the row: numbers, and names in quotes."""
_JOINT = re.compile(r"[_\s-]+")
"""Characters that join the parts of a name and are easily confused."""
_LONGEST = 2000
"""Largest number of characters of a message; quotes from a file or a world may have any length."""


class PerturnError(Exception):
    """Base of all errors raised for the user's eyes; the command line prints it and exits with 2."""

    def __init__(self, message: str = "") -> None:
        """Say what is wrong. What is far too long is cut in its middle: a place comes first, a remedy last."""
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 4 :]}"
        super().__init__(message)


class ConfigError(PerturnError):
    """A recipe or a setting is wrong."""


class DataError(PerturnError):
    """A file, row or trajectory is malformed."""


class ModelError(PerturnError):
    """A model, tokenizer or chat template cannot be used."""


class EnvironmentFailure(PerturnError):
    """An environment could not start, reset or step."""


class NotComeBack(EnvironmentFailure):
    """A world did not answer recorded actions as it did when they were recorded."""


class JudgeFailure(PerturnError):
    """A judge gave no rating of an episode, or of one of its turns."""


class WorldLost(EnvironmentFailure):
    """A world's process died or ran into a time limit; its episode may be played again."""


class BystanderLost(WorldLost):
    """A world died because a process that it shared died, not because of its own action."""


class EngineFailure(PerturnError):
    """An inference engine could not answer."""


class ContextFull(EngineFailure):
    """A conversation leaves no room for an answer in the model's context."""


class RunError(PerturnError):
    """A run folder is missing, belongs to another recipe, or lacks the input of a stage."""


class StorageError(RunError):
    """A file cannot be written: the disk is full, read-only or broken."""


class InUseError(RunError):
    """Another process works in the run folder."""


class BudgetError(RunError):
    """The budget of a run is spent; all that was recorded is kept."""


def closest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known word that is most like a word, if one is like it.

    Upper and lower case, `_`, `-` and spaces count as equal. Sections that all dotted keys share are not compared:
    otherwise any two keys of a deep section would be similar.

    Args:
        word: Such as `align.loss.nam`.
        known: Such as the keys of that section.
        cutoff: Least share of characters that both have in common, from 0 to 1.
    """
    known = list(known)
    section = word[: word.rfind(".") + 1]
    if not all(each.startswith(section) for each in known):
        section = ""
    plain = {_plain(each[len(section) :]): each for each in reversed(known)}
    found = difflib.get_close_matches(_plain(word[len(section) :]), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def _plain(word: str) -> str:
    return _JOINT.sub("-", word.casefold())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the sentence that names the closest known word and lists all of them."""
    known = sorted(known)
    close = closest(word, known)
    guess = f" Did you mean {close!r}?" if close else ""
    return f"{guess} Known: {', '.join(known) or 'none'}."


def check_known(word: object, known: Collection[str], says: str) -> None:
    """Raise unless a word is known; the message names the fault and lists the known words.

    Raises:
        ConfigError: Such as `unknown split 'tset'. Did you mean 'test'? Known: test, train.`
    """
    if word not in known:
        raise ConfigError(f"{says}.{did_you_mean(str(word), known)}")


def check_type(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise unless a value is of a type.

    Args:
        name: The argument or setting.
        value: What was given.
        kind: A class, a union of classes, or an abstract class such as `Callable`.
        expected: The type in words.

    Raises:
        ConfigError: Such as `sampling must be a perturn.types.Sampling, got 1.0.`
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {expected}, got {reprlib.repr(value)}.")


def check_none(faults: Iterable[str | None]) -> None:
    """Raise if there is a fault; the faults after the first one are not looked for. None and "" are not faults.

    Raises:
        ConfigError: With the first fault.
    """
    for fault in filter(None, faults):
        raise ConfigError(fault)


@contextmanager
def within(where: str, *kinds: type[Exception], after: str = "") -> Iterator[None]:
    """Put a place before the text of each `ConfigError`; a `ValueError` on settings becomes one.

    Args:
        where: The place, or the failed operation.
        kinds: Further exceptions that mean a wrong setting here.
        after: What to do, after the text.

    Raises:
        ConfigError: With the place and the text.
    """
    caught: tuple[type[Exception], ...] = (ConfigError, ValueError, *kinds)
    try:
        yield
    except caught as error:
        raise ConfigError(f"{where}{error}{after}") from error


def by_reason(refused: Iterable[T], reason: Callable[[T], str]) -> list[list[T]]:
    """Return refused things in groups whose reasons differ in numbers and names alone, by the first of each."""
    groups: dict[str, list[T]] = {}
    for one in refused:
        groups.setdefault(_VARIES.sub("", reason(one)), []).append(one)
    return list(groups.values())


def refusal(name: str, refused: Sequence[tuple[int | str, str]], unit: str = "row") -> str:
    """Say which rows of a dataset are rejected.

    Each reason has its first row, the number of rows, and the first message.

    Places of rows are numbers of a unit, such as `row` or `line`.
    """
    groups = by_reason(refused, lambda row: row[1])
    found = []
    for rows in groups[:_SHOWN]:
        first = ", ".join(str(index) for index, _ in rows[:_SHOWN])
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        found.append(f"{name} {unit} {first}{more}: {rows[0][1]}")
    if others := sum(map(len, groups[_SHOWN:])):
        found.append(f"And {others} more for other reasons.")
    if len(refused) == MOST_REFUSED:
        found.append(f"No row after {MOST_REFUSED} bad ones was looked at.")
    return " ".join(found)
