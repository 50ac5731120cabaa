"""Errors for users. Each message names the location, the expected value, the actual value, and the remedy."""

import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

MOST_REFUSED = 1000
"""Maximum number of rejected rows of a dataset; after this number, the remaining rows are not checked."""
_SHOWN = 3
"""Maximum number of reasons for rejected rows in a message, and of rows named for each reason."""
_VARIES = re.compile(r"'[^']*'|\d+")
"""Parts of a reason that depend on the row: numbers, and names in quotes."""
_JOINT = re.compile(r"[_\s-]+")
"""Characters that separate the parts of a name and are easily confused."""
_LONGEST = 2000
"""Maximum number of characters of a message. Longer messages occur if they quote a file or an environment."""
_QUOTE = reprlib.Repr()
"""Quotes a value in a message; it shortens long values without reading all of their elements."""
_QUOTE.maxstring = _QUOTE.maxother = 200


class PerturnError(Exception):
    """Base class of all errors for users. The command line prints the message and exits with status 2."""

    def __init__(self, message: str = "") -> None:
        """Make an error. A long message is cut in its middle, which keeps the location and the remedy."""
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
    """An environment did not reproduce the recorded observations when recorded actions were replayed."""


class JudgeFailure(PerturnError):
    """A judge returned no rating for an episode, or for one of its turns."""


class WorldLost(EnvironmentFailure):
    """The process of an environment died or exceeded a time limit. Its episode may be repeated."""


class BystanderLost(WorldLost):
    """An environment was lost because a shared process died, and not because of its own action."""


class EngineFailure(PerturnError):
    """An inference engine could not answer a prompt."""


class PromptRejected(EngineFailure):
    """A chat template or a server rejected the conversation of a prompt, such as one with two system messages."""


class ContextFull(EngineFailure):
    """A conversation fills the model's context, so there is no room for an answer."""


class RunError(PerturnError):
    """A run folder is missing, belongs to another recipe, or lacks the input of a stage."""


class StorageError(RunError):
    """A file cannot be written, for example because the disk is full or read-only."""


class InUseError(RunError):
    """Another process is using the run folder."""


class BudgetError(RunError):
    """The budget of a run is spent. All records are kept."""


def type_name(kind: type[BaseException]) -> str:
    """Return the name of an exception's type, with its module if another error of this module has the name."""
    own = globals().get(kind.__name__, kind)
    return kind.__name__ if own is kind else f"{kind.__module__}.{kind.__qualname__}"


def closest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known word that is most similar to a word; None if no known word is similar enough.

    Case is ignored, and `_`, `-` and spaces count as equal. A section that all dotted keys share is not compared, since
    otherwise any two keys of a deep section would be similar.

    Args:
        word: Word of the user, such as `align.loss.nam`.
        known: Known words, such as all keys of the section `align.loss`.
        cutoff: Minimum similarity of the two words, in [0, 1]; see `difflib.get_close_matches`.
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
    """Raise an error unless a word is known.

    Args:
        word: The word.
        known: All known words.
        says: Beginning of the message, such as `unknown split 'tset'`.
        remedy: End of the message, which says what to do.

    Raises:
        ConfigError: Such as `unknown split 'tset'. Did you mean 'test'? Known: test, train.`
    """
    if word not in known:
        raise ConfigError(f"{says}.{did_you_mean(str(word), known)}{_then(remedy)}")


def check_free(word: str, taken: Collection[str], says: str, remedy: str) -> None:
    """Raise an error if a name is taken.

    Args:
        word: The name.
        taken: Names that are in use.
        says: Beginning of the message, such as `package x adds to perturn.losses the name`.
        remedy: End of the message, which says what to do.

    Raises:
        ConfigError: Such as `package x adds to perturn.losses the name 'sft', and that name is taken. Rename it.`
    """
    if word in taken:
        raise ConfigError(f"{says} {word!r}, and that name is taken.{_then(remedy)}")


def check_fit(fits: object, name: str, must: str, got: object, remedy: str = "") -> None:
    """Raise an error unless a value meets a requirement.

    Args:
        fits: Whether the value meets the requirement.
        name: Name of the setting or argument, or of the function that returned the value.
        must: The requirement, such as `be >= 0` or `have a list for each key`.
        got: The value, or the part of the value that does not meet the requirement.
        remedy: Sentence that says what to do, if `must` does not say it.

    Raises:
        ConfigError: Such as `limit must be >= 0, got -1.`
    """
    if not fits:
        raise ConfigError(f"{name} must {must}, got {_QUOTE.repr(got)}.{_then(remedy)}")


def check_type(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise an error unless a value has a type.

    Args:
        name: Name of the argument or setting.
        value: The value.
        kind: Expected type: a class, a union of classes, or an abstract class such as `Callable`.
        expected: Expected type in words, for the message.

    Raises:
        ConfigError: Such as `sampling must be a perturn.types.Sampling, got 1.0.`
    """
    check_fit(isinstance(value, kind), name, f"be {expected}", value)


def required(value: T | None, name: str, reader: str, remedy: str) -> T:
    """Return a value, or raise an error if the value is missing.

    Args:
        value: The value; None: it is missing.
        name: Name of the setting, option or file.
        reader: Clause that says which part needs the value, such as `this stage plays in it`.
        remedy: Clause that says what to do.

    Raises:
        ConfigError: Such as `environment is missing, and this stage plays in it; set it in the recipe.`
    """
    if value is None:
        raise ConfigError(f"{name} is missing, and {reader}; {remedy}.")
    return value


def check_belongs(given: Mapping[str, object], there: object, owner: str, remedy: str) -> None:
    """Raise an error if settings are given without the option that they belong to.

    Args:
        given: Name -> value of the settings. None, False and empty values count as not given; 0 counts as given.
        there: Whether the option is given.
        owner: Name of the option, such as `--to hub`.
        remedy: Clause that says what to do.

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
    """Raise an error if a part needs something that its provider does not have.

    Args:
        reader: Part that needs something, such as `credit Mine`.
        needs: Names of the needed things.
        provides: Names of the provided things.
        owner: Provider, such as `training`.
        remedy: Clause that says what to do, such as to choose another provider.

    Raises:
        ConfigError: Such as `credit Mine needs values, which training does not provide; give rows with weights.`
    """
    if missing := [each for each in needs if each not in provides]:
        raise ConfigError(f"{reader} needs {listed(missing)}, which {owner} does not provide; {remedy}.")


def listed(names: Sequence[str]) -> str:
    """Join names to a list within a sentence: `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _then(remedy: str) -> str:
    return remedy and f" {remedy}"


def check_none(faults: Iterable[str | None]) -> None:
    """Raise an error with the first fault. None and "" are no faults; the iterable is read up to the first fault.

    Raises:
        ConfigError: With the text of the first fault.
    """
    for fault in filter(None, faults):
        raise ConfigError(fault)


@contextmanager
def within(where: str, *kinds: type[Exception], after: str = "") -> Iterator[None]:
    """Add a location to the text of each `ConfigError`, and turn a `ValueError` into a `ConfigError`.

    Args:
        where: Text before the message: the location, or the failed operation.
        kinds: Further exceptions to turn into a `ConfigError`.
        after: Text after the message, such as a remedy.

    Raises:
        ConfigError: With the location and the text of the error.
    """
    caught: tuple[type[Exception], ...] = (ConfigError, ValueError, *kinds)
    try:
        yield
    except caught as error:
        raise ConfigError(f"{where}{error}{after}") from error


def by_reason(refused: Iterable[T], reason: Callable[[T], str]) -> list[list[T]]:
    """Group rejected items whose reasons differ only in numbers and quoted names; keep the order of first items."""
    groups: dict[str, list[T]] = {}
    for one in refused:
        groups.setdefault(_VARIES.sub("", reason(one)), []).append(one)
    return list(groups.values())


def refusal(name: str, refused: Sequence[tuple[int | str, str]], unit: str = "row") -> str:
    """Return a message that says which rows of a dataset are rejected, and why.

    For each reason, the message has the first rows, the number of further rows, and the text for the first row.

    Args:
        name: Name of the dataset.
        refused: Row number or position, and reason, of each rejected row.
        unit: Unit of the row numbers, such as `row` or `line`.
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
