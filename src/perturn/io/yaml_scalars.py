"""YAML scalars that keep their original text, for settings that expect a text.

YAML 1.1 reads these texts without quotes as other types: `on` as a boolean, `007` as an octal number, `2026-01-01` as a
date, and `12:30` as a number of base 60. It reads `1e-6` as a text. Here numbers follow YAML 1.2, and dates are texts.
Each scalar keeps its original text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import yaml


class _Number:
    """A number that keeps its original text."""

    text: str = ""

    @classmethod
    def of(cls, value: float, text: str) -> Self:
        """Return a number that keeps its original text."""
        made = cls(value)  # type: ignore[call-arg]  # the other base of each subclass is a number
        made.text = text
        return made


class WrittenInt(_Number, int):
    """A whole number that keeps its original text."""


class WrittenFloat(_Number, float):
    """A float that keeps its original text."""


class Written(str):
    """A text without quotes, such as `on` or `1e-6`, that is a boolean or a number unless a text is expected."""

    @property
    def value(self) -> bool | float:
        """The boolean or number that the text stands for."""
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
"""Tag, pattern of the unquoted texts that get this tag, and first characters of these texts. The first match counts."""


def keeping_text(loader: type[Any]) -> type[Any]:
    """Return a subclass of a PyYAML loader that reads scalars as this module describes."""
    kind: Any = type(f"{loader.__name__}OfTexts", (loader,), {"yaml_implicit_resolvers": {}})
    for tag, texts, first in _RESOLVERS:
        kind.add_implicit_resolver(tag, re.compile(rf"(?:{texts})\Z"), list(first))
    for tag in (_WRITTEN_TAG, f"{_SAME_TAG}int", f"{_SAME_TAG}float"):
        kind.add_constructor(tag, _construct)
    return kind  # type: ignore[no-any-return]


def quoting(dumper: type[Any]) -> type[Any]:
    """Return a subclass of a PyYAML dumper. It quotes texts that a loader of `keeping_text` would not read as texts."""
    kind: Any = type(f"{dumper.__name__}OfTexts", (dumper,), {})
    for tag, texts, first in _RESOLVERS:
        kind.add_implicit_resolver(tag, re.compile(rf"(?:{texts})\Z"), list(first))
    return kind  # type: ignore[no-any-return]


def _construct(_: Any, node: yaml.ScalarNode) -> Written | WrittenInt | WrittenFloat:
    """Construct a number, or a text that stands for a boolean or number."""
    text = str(node.value)
    if node.tag == _WRITTEN_TAG:
        return Written(text)
    if node.tag == f"{_SAME_TAG}int":
        return WrittenInt.of(_whole(text), text)
    return WrittenFloat.of(_number(text), text)


def _whole(text: str) -> int:
    """Return the whole number of a text. A leading 0 does not make it octal."""
    digits = text.replace("_", "")
    return int(digits, 0) if re.match(r"[-+]?0[box]", digits) else int(digits)


def _number(text: str) -> float:
    """Return the float of a text, which may be in YAML's form of infinity or NaN."""
    return float(re.sub(r"\.(?=inf|nan)", "", text.replace("_", "").lower()))


def value_of(value: Any) -> Any:
    """Return a value, and all values within it, as plain Python, for a setting that does not expect a text."""
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
    """Return a key of a mapping as plain Python. A key such as `on` is a text."""
    return str(key) if isinstance(key, Written) else value_of(key)


def text_of(value: Any) -> str | None:
    """Return the original text of a scalar; None if it has none."""
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
