"""Numbers and booleans of YAML that keep the text they were written with, for settings that expect a text.

Without quotes, YAML 1.1 reads `on`, `007`, `2026-01-01` and `12:30` as a boolean, an octal number, a date and a number
of base 60, and `1e-6` as a text. Here numbers follow YAML 1.2 and dates are texts. Each scalar keeps the text that was
typed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import yaml


class _Number:
    """A number that keeps the text it was written with."""

    text: str = ""

    @classmethod
    def of(cls, value: float, text: str) -> Self:
        """Return the number with its text."""
        made = cls(value)  # type: ignore[call-arg]  # the other base of each subclass is a number
        made.text = text
        return made


class WrittenInt(_Number, int):
    """A whole number with the text it was written with."""


class WrittenFloat(_Number, float):
    """A number with the text it was written with."""


class Written(str):
    """A text without quotes that YAML reads as a boolean or a number where no text is expected: `on`, `1e-6`."""

    @property
    def value(self) -> bool | float:
        """The boolean or number that it means."""
        word = self.lower()
        return word in _TRUE if word in (*_TRUE, *_FALSE) else float(self.replace("_", ""))


_TRUE, _FALSE = ("yes", "on"), ("no", "off")

_SAME_TAG = "tag:yaml.org,2002:"
_WRITTEN_TAG = "tag:perturn,2026:written"
_RESOLVERS = (
    (f"{_SAME_TAG}bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (f"{_SAME_TAG}null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (f"{_SAME_TAG}merge", r"<<", "<"),
    (f"{_SAME_TAG}int", r"[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
    (
        f"{_SAME_TAG}float",
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    (
        _WRITTEN_TAG,
        r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"
        r"|[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+",
        "yYnNoO-+.0123456789",
    ),
)
"""Tag, texts without quotes that have it, and characters that these begin with; of two tags the first one counts."""


def keeping_text(loader: type[Any]) -> type[Any]:
    """Return a class of a loader of PyYAML that reads scalars so."""
    kind: Any = type(f"{loader.__name__}OfTexts", (loader,), {"yaml_implicit_resolvers": {}})
    for tag, texts, first in _RESOLVERS:
        kind.add_implicit_resolver(tag, re.compile(rf"(?:{texts})\Z"), list(first))
    for tag in (_WRITTEN_TAG, f"{_SAME_TAG}int", f"{_SAME_TAG}float"):
        kind.add_constructor(tag, _construct)
    return kind  # type: ignore[no-any-return]


def quoting(dumper: type[Any]) -> type[Any]:
    """Return a class of a dumper of PyYAML that puts texts in quotes which such a loader reads as something else."""
    kind: Any = type(f"{dumper.__name__}OfTexts", (dumper,), {})
    for tag, texts, first in _RESOLVERS:
        kind.add_implicit_resolver(tag, re.compile(rf"(?:{texts})\Z"), list(first))
    return kind  # type: ignore[no-any-return]


def _construct(_: Any, node: yaml.ScalarNode) -> Written | WrittenInt | WrittenFloat:
    """Make the value of a number, or of a text that stands for something."""
    text = str(node.value)
    if node.tag == _WRITTEN_TAG:
        return Written(text)
    if node.tag == f"{_SAME_TAG}int":
        return WrittenInt.of(_whole(text), text)
    return WrittenFloat.of(_number(text), text)


def _whole(text: str) -> int:
    """Return the number of a text; a leading 0 alone does not make it octal."""
    digits = text.replace("_", "")
    return int(digits, 0) if re.match(r"[-+]?0[box]", digits) else int(digits)


def _number(text: str) -> float:
    """Return the number of a text, which may be YAML's own infinity."""
    return float(re.sub(r"\.(?=inf|nan)", "", text.replace("_", "").lower()))


def value_of(value: Any) -> Any:
    """Return a value, and all values within it, as plain Python where no text is expected."""
    if isinstance(value, Mapping):
        return {value_of_key(key): value_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [value_of(each) for each in value]
    if isinstance(value, Written):
        return value.value
    if isinstance(value, WrittenInt):
        return int(value)
    return float(value) if isinstance(value, WrittenFloat) else value


def value_of_key(key: Any) -> Any:
    """Return a key of a mapping as plain Python; a word such as `on` is a text there."""
    return str(key) if isinstance(key, Written) else value_of(key)


def text_of(value: Any) -> str | None:
    """Return the text that a scalar was written with; None if it has none."""
    if isinstance(value, str):
        return str(value)
    return value.text or None if isinstance(value, WrittenInt | WrittenFloat) else None


def as_yaml_1_1(value: Any) -> Any:
    """Return a value as YAML 1.1 reads it: booleans such as `on`, and `1e-6` as a text."""
    if isinstance(value, Mapping):
        return {value_of_key(key): as_yaml_1_1(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_yaml_1_1(each) for each in value]
    if isinstance(value, Written):
        return value.value if isinstance(value.value, bool) else str(value)
    return value_of(value)
