"""Marks for the type of a setting, such as bounds: `timeout: Annotated[float, Bound(above=0), EFFORT] = 120.0`."""

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

from perturn.errors import within

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """Interval of numbers that a setting may have. NaN is always outside."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def broken_by(self, value: float) -> str | None:
        """Return the first condition that a number violates, such as `> 0`; None: the number is inside the bounds."""
        holds = {
            f">= {self.least}": self.least is None or value >= self.least,
            f"> {self.above}": self.above is None or value > self.above,
            f"<= {self.most}": self.most is None or value <= self.most,
            f"< {self.below}": self.below is None or value < self.below,
        }
        return next((side for side, true in holds.items() if not true), None)


@dataclass(frozen=True)
class OneOf:
    """Set of values that a setting may have."""

    known: tuple[str, ...]


@dataclass(frozen=True)
class Effort:
    """Mark of a setting that changes where, how fast or how long a run computes, but not its results."""


EFFORT = Effort()
"""Instance of `Effort` for annotations: `patience: Annotated[int, EFFORT] = 1`."""


@dataclass(frozen=True)
class Outside:
    """Mark of a setting that names files outside the run folder. A run records digests of these files.

    The setting may be a text, or a list or mapping of texts. An empty text names no file.
    """

    kind: Literal["path", "rows", "model", "code", "template", "maybe"]
    """Kind of the text. path: a file or folder. rows: a file or folder of rows, or a dataset of the Hub. model: a
    model. code: `module:object` or `file.py:object`. template: a chat template. maybe: any text, which may be the path
    of a file that the user's code reads."""


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
    """Mark of a recipe section whose `name` selects an entry of a table; the other keys are settings of the entry."""

    table: str
    """Name of the table in `perturn.table_index`."""
    shared: type | None = None
    """Dataclass of the settings that the section has for every entry; None: no such settings."""
    default: str | None = None
    """Name of the entry that a section without `name` selects. With a default, the section is parsed into the entry.
    None: the section stays a mapping."""


POSITIVE = Bound(above=0, below=math.inf)
"""Finite numbers above 0."""
NOT_NEGATIVE = Bound(least=0, below=math.inf)
"""Finite numbers >= 0."""
SHARE = Bound(least=0, most=1)
"""Numbers from 0 to 1."""

SEED = Bound(least=0, below=2**32)
"""Seeds that numpy and transformers accept."""

SECONDS = Bound(above=0, most=10**9)
"""Time limits, in seconds. The upper bound keeps them within the range of the operating system."""


def check_bounds(settings: Any) -> None:
    """Check the fields of a dataclass against the bounds and the sets of values in their types.

    Raises:
        ValueError: If a value is not allowed; the message names the first such value.
    """
    hints = hints_of(type(settings))
    check_values({name: getattr(settings, name) for name in hints}, hints)


def check_values(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Check values against the bounds and the sets of values in their types.

    Args:
        values: Name -> value.
        hints: Name -> type; a value without a type is not checked.

    Raises:
        ValueError: If a value is not allowed; the message names the first such value.
    """
    for name, value in values.items():
        for mark in marks(hints.get(name)):
            if isinstance(mark, Bound) and isinstance(value, int | float):
                if (side := mark.broken_by(value)) is not None:
                    raise ValueError(f"{name} must be {side}, got {value}.")
            elif isinstance(mark, OneOf) and value not in mark.known:
                raise ValueError(f"{name} must be one of {', '.join(mark.known)}, got {value!r}.")


def bounded(kind: type[T]) -> type[T]:
    """Make a dataclass check its bounds when it is constructed. Write this decorator below `@dataclass`.

    A `__post_init__` of the class or of its base class runs after the check.
    """
    own = getattr(kind, "__post_init__", check_bounds)

    def __post_init__(settings: Any) -> None:
        check_bounds(settings)
        own(settings)

    kind.__post_init__ = check_bounds if own is check_bounds else __post_init__  # type: ignore[attr-defined]
    return kind


def efforts(kind: Any) -> set[str]:
    """Return the names of a class's settings that are marked as `EFFORT`: its fields or constructor arguments."""
    return {name for name, hint in hints_of(kind).items() if EFFORT in marks(hint)}


def hints_of(kind: Any, *, marked: bool = True) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields, or of another class's constructor arguments, by name. They are cached.

    Args:
        kind: The class.
        marked: Whether the types keep the metadata of `Annotated`.
    """
    return _hints_of(kind, marked)


@lru_cache(maxsize=1000)
def _hints_of(kind: Any, marked: bool) -> Mapping[str, Any]:
    source = kind if is_dataclass(kind) else kind.__init__
    says = f"the types of the settings of {kind!r:.200} cannot be read: NameError: "
    with within(says, NameError, after="; import the name outside of TYPE_CHECKING."):
        return MappingProxyType(typing.get_type_hints(source, include_extras=marked))


def bounds(hint: Any) -> Iterator[Bound]:
    """Yield the bounds in a type, including the parts of a union."""
    yield from (each for each in marks(hint) if isinstance(each, Bound))


def texts(kind: Any) -> Mapping[str, str]:
    """Return the docstring below each field of a dataclass, by field, including the fields of a base dataclass."""
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
    """Yield the `Annotated` metadata of a type and of its parts."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        yield from marks(part)
