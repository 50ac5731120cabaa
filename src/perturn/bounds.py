"""The facts that a setting states at its field: `timeout: Annotated[float, Bound(above=0), EFFORT] = 120.0`."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """An interval of numbers; NaN lies in none."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def broken_by(self, value: float) -> str | None:
        """Return the side on which a number lies outside, such as `> 0`; None: it lies inside."""
        holds = {
            f">= {self.least}": self.least is None or value >= self.least,
            f"> {self.above}": self.above is None or value > self.above,
            f"<= {self.most}": self.most is None or value <= self.most,
            f"< {self.below}": self.below is None or value < self.below,
        }
        return next((side for side, true in holds.items() if not true), None)


@dataclass(frozen=True)
class OneOf:
    """Values that a setting may have."""

    known: tuple[str, ...]


@dataclass(frozen=True)
class Effort:
    """The mark of a setting that changes where, how fast or how far a run works, but not its results."""


EFFORT = Effort()
"""The mark of such a setting: `patience: Annotated[int, EFFORT] = 1`."""


@dataclass(frozen=True)
class Outside:
    """Mark of a setting that names files outside the run folder. A run keeps digests of these files.

    The setting may be a text, or a list or mapping of texts. An empty text is not an input.
    """

    kind: Literal["path", "rows", "model", "code", "template", "maybe"]
    """Kind of the text: a file or folder; a source of rows, which may also be a data set of the Hub; a model;
    `module:object` or `file.py:object`; a chat template; or anything, which may be a file or folder that code of the
    user's reads."""


PATH = Outside("path")
MODEL = Outside("model")
"""Mark of a setting that names a model."""
CODE = Outside("code")
"""Mark of a setting that names an object in code, as `module:object` or `file.py:object`."""
ROWS = Outside("rows")
"""Mark of a setting that names a source of rows."""
TEMPLATE, MAYBE_PATH = Outside("template"), Outside("maybe")


@dataclass(frozen=True)
class EntryOf:
    """The mark of a section whose `name` picks an entry of a table and whose other keys are the entry's settings."""

    table: str
    """Kind of the table, as `perturn.table_index` names it."""
    shared: type | None = None
    """Dataclass of the settings that the section has for every entry; None: it has none."""
    default: str | None = None
    """The entry that a section without `name` picks. A section with a default is parsed into the entry; without one it
    stays a mapping."""


POSITIVE = Bound(above=0, below=math.inf)
"""Finite numbers above 0."""
NOT_NEGATIVE = Bound(least=0, below=math.inf)
"""Finite numbers of at least 0."""
SHARE = Bound(least=0, most=1)
"""Numbers from 0 to 1."""

SEED = Bound(least=0, below=2**32)
"""Seeds that numpy and transformers take."""

SECONDS = Bound(above=0, most=10**9)
"""Time limits; the operating system counts no further than some centuries."""


def check_bounds(settings: Any) -> None:
    """Compare the fields of a dataclass with the bounds and the values that they declare.

    Raises:
        ValueError: For the first value outside.
    """
    hints = hints_of(type(settings))
    check_values({name: getattr(settings, name) for name in hints}, hints)


def check_values(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Compare values with the bounds and the values that their types declare.

    Args:
        values: By name.
        hints: Types by name; a value without one is not compared.

    Raises:
        ValueError: For the first value outside.
    """
    for name, value in values.items():
        for mark in marks(hints.get(name)):
            if isinstance(mark, Bound) and isinstance(value, int | float):
                if (side := mark.broken_by(value)) is not None:
                    raise ValueError(f"{name} must be {side}, got {value}.")
            elif isinstance(mark, OneOf) and value not in mark.known:
                raise ValueError(f"{name} must be one of {', '.join(mark.known)}, got {value!r}.")


def bounded(kind: type[T]) -> type[T]:
    """Make a dataclass compare its fields with their bounds when it is made; written below `@dataclass`."""
    kind.__post_init__ = check_bounds  # type: ignore[attr-defined]
    return kind


def efforts(kind: Any) -> set[str]:
    """Return the settings of a class that are marked as `EFFORT`, among its fields or constructor arguments."""
    return {name for name, hint in hints_of(kind).items() if EFFORT in marks(hint)}


def hints_of(kind: Any, *, marked: bool = True) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields or of a class's constructor arguments by name; evaluated once.

    Args:
        kind: The class.
        marked: Whether the types keep what `Annotated` adds to them.
    """
    return _hints_of(kind, marked)


@lru_cache(maxsize=1000)
def _hints_of(kind: Any, marked: bool) -> Mapping[str, Any]:
    source = kind if is_dataclass(kind) else kind.__init__
    return MappingProxyType(typing.get_type_hints(source, include_extras=marked))


def bounds(hint: Any) -> Iterator[Bound]:
    """Yield the bounds within a type, of the parts of a union too."""
    yield from (each for each in marks(hint) if isinstance(each, Bound))


def texts(kind: Any) -> Mapping[str, str]:
    """Return the text below each field of a dataclass, in its own source or in the source of its base class."""
    return _texts_of(kind)


@lru_cache(maxsize=1000)
def _texts_of(kind: Any) -> Mapping[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = dict(texts(kind.__base__)) if is_dataclass(kind.__base__) else {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            found[field.target.id] = str(text.value) if isinstance(text, ast.Constant) else ""
    return MappingProxyType(found)


def marks(hint: Any) -> Iterator[Any]:
    """Yield all that `Annotated` adds to a type and to its parts."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        yield from marks(part)
