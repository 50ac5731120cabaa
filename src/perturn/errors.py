"""The errors users meet. Each message names the place, the expected value, the value found, and the remedy."""

import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
_QUOTE = reprlib.Repr()
"""How a message quotes a value; the elements of a long list are not all looked at."""
_QUOTE.maxstring = _QUOTE.maxother = 200


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


def check_known(word: object, known: Collection[str], says: str, remedy: str = "") -> None:
    """Raise unless a word is known; the message names the fault and lists the known words.

    Raises:
        ConfigError: Such as `unknown split 'tset'. Did you mean 'test'? Known: test, train.`
    """
    if word not in known:
        raise ConfigError(f"{says}.{did_you_mean(str(word), known)}{_then(remedy)}")


def check_free(word: str, taken: Collection[str], says: str, remedy: str) -> None:
    """Raise if a name is taken.

    Args:
        word: The name.
        taken: Names that others have.
        says: Who gives the name.
        remedy: What to do.

    Raises:
        ConfigError: Such as `package x adds 'sft' to perturn.losses, and that name is taken. Rename it.`
    """
    if word in taken:
        raise ConfigError(f"{says} {word!r}, and that name is taken.{_then(remedy)}")


def check_fit(fits: object, name: str, must: str, got: object, remedy: str = "") -> None:
    """Raise unless a value is what its setting, or its caller, must be given.

    Args:
        fits: Whether it is.
        name: The setting, the argument, or who returned the value.
        must: What it must be, such as `be >= 0` or `have a list for each key`.
        got: The value, or the part of it that does not fit.
        remedy: A sentence that says what to do, where `must` does not.

    Raises:
        ConfigError: Such as `limit must be >= 0, got -1.`
    """
    if not fits:
        raise ConfigError(f"{name} must {must}, got {_QUOTE.repr(got)}.{_then(remedy)}")


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
    check_fit(isinstance(value, kind), name, f"be {expected}", value)


def required(value: T | None, name: str, reader: str, remedy: str) -> T:
    """Return a value, or raise if it is missing.

    Args:
        value: The value; None: it is missing.
        name: The setting, option or file.
        reader: The clause that says who reads it.
        remedy: What to do.

    Raises:
        ConfigError: Such as `environment is missing, and this stage plays in it; set it in the recipe.`
    """
    if value is None:
        raise ConfigError(f"{name} is missing, and {reader}; {remedy}.")
    return value


def check_belongs(given: Mapping[str, object], there: object, owner: str, remedy: str) -> None:
    """Raise if settings are given without what they belong to.

    Args:
        given: Values by the names of the settings; None, False and empty values are not given, and 0 is.
        there: Whether what they belong to is there.
        owner: What they belong to.
        remedy: What to do.

    Raises:
        ConfigError: Such as `--repo and --private belong to --to hub; add it, or leave them out.`
    """
    names = [name for name, value in given.items() if value or (value == 0 and value is not False)]
    if names and not there:
        verb = "belongs" if len(names) == 1 else "belong"
        raise ConfigError(f"{listed(names)} {verb} to {owner}; {remedy}.")


def check_provided(
    reader: str, needs: Iterable[str], provides: Collection[str], owner: str, remedy: str
) -> None:
    """Raise if something is needed that its owner does not provide.

    Args:
        reader: Who needs it.
        needs: What it needs.
        provides: What there is.
        owner: Who would provide it.
        remedy: What to do, such as to take another owner.

    Raises:
        ConfigError: Such as `credit Mine needs values, which training does not provide; give rows with weights.`
    """
    if missing := [each for each in needs if each not in provides]:
        raise ConfigError(f"{reader} needs {listed(missing)}, which {owner} does not provide; {remedy}.")


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _then(remedy: str) -> str:
    return remedy and f" {remedy}"


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
