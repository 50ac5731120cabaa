"""Convert data of YAML to settings, and settings to YAML. An unknown key is an error."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import NoneType
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from perturn.bounds import EntryOf, check_values, hints_of
from perturn.config.explorer_settings import EXPLORER, check_explorer
from perturn.config.key_suggestions import entry_of, item_at, keys_of, picks, unknown_key, unknown_name
from perturn.config.row_maker_settings import ROWS, check_row_maker
from perturn.errors import ConfigError, PerturnError, check_fit, check_type, closest, required
from perturn.io.secrets import holds_secret, may_be_secret, names_secret
from perturn.io.user_code import load_object
from perturn.io.yaml_scalars import quoting, text_of, value_of, value_of_key
from perturn.table import check_decorated, making, name_of
from perturn.table_index import table as table_of

T = TypeVar("T")

_CHECKS: dict[EntryOf, Callable[[Any], None]] = {EXPLORER: check_explorer, ROWS: check_row_maker}
"""Mark of a section that is parsed into an entry of a table -> check of the entry."""
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
}
"""First word of the kind of a pydantic error -> description of the expected value. Other errors describe it."""
_LISTS = (list, tuple, Sequence)
_PLAIN = (str, int, float, bool, NoneType)
"""Types of the values that a recipe can hold, besides lists and mappings."""
_DUMPER = quoting(yaml.SafeDumper)
_SECRET_NAME = re.compile(r"(api[-_]?key|authorization)", re.IGNORECASE)
_VARIABLES = ("env", "headers", "extra_headers", "default_headers")
"""Settings that map names of environment variables or HTTP headers to values."""


def refuse_secrets(data: Any) -> None:
    """Reject a value that looks like an API key, without showing it. Recipes are copied into runs and reports."""
    for where, section, key, value in _leaves(data):
        if section in _VARIABLES:
            is_named = names_secret(key) and may_be_secret(value)
        else:
            is_named = value not in (None, "") and bool(_SECRET_NAME.fullmatch(key))
        if is_named or holds_secret(str(value)):
            reader = "pass_env" if section == "env" else "engine.api_key_env"
            raise ConfigError(
                f"{where} holds what looks like a key; keys stay out of recipes, which are copied into runs and "
                f"reports. Export it, such as in OPENAI_API_KEY, and name the variable in {reader}."
            )


def _leaves(
    data: Any, where: str = "", section: str = "", key: str = ""
) -> Iterator[tuple[str, str, str, Any]]:
    """Yield `(dotted path, name of the section, name of the setting, value)` for each value that is no container."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _leaves(value, _join(where, str(name)), key, str(name))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{where}[{index}]", section, key)
    else:
        yield where, section, key, data


def to_yaml(recipe: Any) -> str:
    """Return the resolved recipe as YAML that `read_recipe` reads back. Characters that break lines are escaped."""
    return yaml.dump(to_mapping(recipe), Dumper=_DUMPER, sort_keys=False)


def to_mapping(settings: Any) -> dict[str, Any]:
    """Return settings as nested mappings, which `parse` turns back into settings. An entry's `name` comes first."""
    found, hints = dataclasses.asdict(settings), hints_of(type(settings))
    for name in found:
        value, mark = getattr(settings, name), entry_of(hints[name])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = {"name": name_of(table_of(mark.table), type(value))} if mark else {}
            found[name] = named | to_mapping(value)
    return found


def parse(
    kind: type[T],
    data: Mapping[str, Any],
    where: str = "",
    *,
    also: Sequence[str] = (),
    root: Any = None,
    table: Mapping[str, Any] | None = None,
    guarded: bool = False,
) -> T:
    """Make a settings dataclass, nested dataclasses included, or another class from a mapping of keyword arguments.

    Args:
        kind: The class.
        data: Keyword arguments of the class, as YAML gives them.
        where: Dotted path of the mapping in the recipe, for messages.
        also: More keys of the section, for messages.
        root: The dataclass of the whole recipe, for messages. None: `kind`, unless `where` is set.
        table: The table that has the class, for messages. None if no table has it.
        guarded: Whether to report every exception of the class in one line, as for classes of other packages.

    Raises:
        ConfigError: If a key or value is wrong; one line about the first fault.
    """
    if not where:
        refuse_secrets(data)
    settings, top = settings_of(kind), root or (None if where else kind)
    hints, marked = hints_of(kind, marked=False), hints_of(kind)
    for key, value in data.items():
        if str(key) not in settings:
            if isinstance(kind, type) and str(key) in inspect.get_annotations(kind):
                check_decorated(kind, "class", ())
            known = [_join(where, name) for name in settings]
            every = known if top is None else keys_of(top)
            further = [_join(where, name) for name in also]
            others = [name for name, entry in (table or {}).items() if str(key) in settings_of(entry)]
            picked = () if top is None else picks(top)
            raise ConfigError(
                unknown_key(
                    _join(where, str(key)), value, known, every, further=further, others=others, picked=picked
                )
            )
        if mark := entry_of(marked.get(str(key))):
            _require_name(value, _join(where, str(key)), partial(table_of, mark.table))
    _require_all(settings, data, where)
    values = {}
    for key, value in data.items():
        mark, path = entry_of(marked.get(str(key))), _join(where, key)
        if mark and mark.default:
            values[key] = None if value is None else build_entry(mark, value, path, root=top)
        else:
            default = default_of(kind, key) if isinstance(value, Mapping) else None
            values[key] = _value(hints.get(key, Any), value, path, top, default)
    try:
        with making(kind, f"{where}: ", (ValueError, PerturnError) if guarded else (Exception,)):
            made = kind(**values)
        check_values(values, marked)  # a class of another package may not check its own bounds
    except ValueError as error:
        raise ConfigError(_join(where, str(error))) from None
    return made


def _require_all(settings: Mapping[str, inspect.Parameter], data: Mapping[str, Any], where: str) -> None:
    """Reject a section that lacks a setting without default."""
    for name, item in settings.items():
        there = True if name in data or item.default is not item.empty else None
        required(there, _join(where, name), "it has no default", "set it")


def build(
    table: Mapping[str, Any],
    section: Mapping[str, Any],
    where: str,
    also: Sequence[str] = ("name",),
    *,
    root: Any = None,
    guarded: bool = True,
) -> Any:
    """Make an object of the class that a section's `name` picks from a table. The other keys are its arguments.

    Args:
        table: Classes, by name.
        section: `name` and settings. A name `file.py:Class` or `module:Class` is a class of the user's code.
        where: Dotted path of the section in the recipe.
        also: Keys of the section that are not settings of the object.
        root: The dataclass of the whole recipe, for messages; None: the section is used alone.
        guarded: Whether to report every exception of the class in one line; otherwise the caller must report it.
    """
    _require_name(section, where, lambda: table)
    name = str(section.get("name"))
    if ":" in name and name not in table:
        table = {name: load_object(name)}
        check_type(f"{where}.name {name!r}", table[name], type, "a class")
    if name not in table:
        raise ConfigError(unknown_name(where, name, table))
    own = (
        {each.name for each in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(kind := table[name])
        else ()
    )
    if taken := [key for key in also if key in own]:
        raise ConfigError(
            f"{where} {name!r} has a setting {taken[0]!r}, and {where}.{taken[0]} has another meaning; rename the "
            "setting in its class."
        )
    settings = {key: value for key, value in section.items() if key not in also}
    return parse(table[name], settings, where, also=also, root=root, table=table, guarded=guarded)


def build_entry(mark: EntryOf, section: Mapping[str, Any], where: str, *, root: Any = None) -> Any:
    """Return the entry that a section picks; the default entry if the section has no `name`.

    Args:
        mark: Mark of the section's field. It must have a default.
        section: `name` and settings, as YAML gives them.
        where: Dotted path of the section in the recipe.
        root: The dataclass of the whole recipe, for messages; None: the section is used alone.

    Raises:
        ConfigError: If the entry is no dataclass of settings that a recipe can hold, or its own check rejects it.
    """
    name = _value(str, section.get("name", mark.default), f"{where}.name", root)
    made = build(table_of(mark.table), {**section, "name": name}, where, root=root)
    _CHECKS[mark](made)
    must = "be a dataclass; write @dataclass(frozen=True) above the class"
    check_fit(dataclasses.is_dataclass(made), f"{where}.name", must, name)
    for path, _, _, each in _leaves(to_mapping(made), where):
        must = "be a text, a number, true, false or null, or a list or mapping of these"
        remedy = f"A run writes it to its recipe. Change the type in {type(made).__name__}."
        check_fit(type(each) in _PLAIN, path, must, each, remedy)
    return made


def section_of(given: Any, where: str) -> Mapping[str, Any]:
    """Return a function's argument as a section. The argument is a section already, or a name alone.

    Raises:
        ConfigError: If the argument is neither a mapping nor a text.
    """
    if isinstance(given, str):
        return {"name": given}
    check_type(where, given, Mapping, "a name, a section with a name, or an object of a class")
    return cast(Mapping[str, Any], given)


def _require_name(section: Any, where: str, table: Callable[[], Mapping[str, Any]]) -> None:
    """Reject a section that misspells the key `name`, sets it to null, or is no mapping, such as a name alone."""
    if isinstance(section, Mapping):
        if section.get("name", "") is None:
            raise ConfigError(f"{where}.name must be a name, got null. Known: {', '.join(sorted(table()))}.")
        found = (str(key) for key in section if closest(str(key), ["name"], cutoff=0.75))
        if "name" not in section and (key := next(found, None)) is not None:
            raise ConfigError(unknown_key(f"{where}.{key}", None, [f"{where}.name"], ()))
    else:
        remedy = f"Write {where}.name={section!s:.80}."
        check_fit(section is None, where, "be a mapping", section, remedy)


def settings_of(kind: Any) -> dict[str, inspect.Parameter]:
    """Return the keyword arguments of a class, by name."""
    try:
        found = inspect.signature(kind).parameters
    except ValueError:
        raise ConfigError(
            f"{kind!r} takes no settings, since it has no signature; name another class."
        ) from None
    return {
        name: item for name, item in found.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    }


def default_of(kind: Any, name: str) -> Any:
    """Return the default of a setting of a class; `inspect.Parameter.empty` if it has none."""
    own = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    factory = next((each.default_factory for each in own if each.name == name), dataclasses.MISSING)
    return settings_of(kind)[name].default if factory is dataclasses.MISSING else factory()


def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Return the validator of a type hint. The validator is cached if the hint can be hashed."""
    try:
        hash(hint)
    except TypeError:
        return TypeAdapter(hint)
    return _made_once(hint)


_made_once = lru_cache(maxsize=1000)(TypeAdapter)


def _value(hint: Any, value: Any, where: str, root: Any, default: Any = None) -> Any:
    """Convert one value to the type that its field declares. A section keeps the field's default for other keys."""
    _refuse_infinite(value, where)
    for part in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(part) and isinstance(part, type):
            if isinstance(value, str) and hasattr(part, "shorthand"):
                value = {part.shorthand: value}
            if isinstance(value, Mapping):
                kept = to_mapping(default) if type(default) is part else {}
                return parse(part, {**kept, **value}, where, root=root)
    value = _typed(hint, value, where)
    try:
        found = _adapter(hint).validate_python(value)
    except ValidationError as error:
        expected = _expected(hint, error)
        if any(map(dataclasses.is_dataclass, (hint, *typing.get_args(hint)))):
            expected = f"a section of settings, such as {where}.{_first_key(hint)}=..."
            expected += ", or null to leave it out" * (value is False and NoneType in typing.get_args(hint))
        elif len(_members(hint)) == 1 and "[key]" not in (path := error.errors()[0]["loc"]):
            where, value = item_at(where, value, path)
        raise ConfigError(f"{where} must be {expected}, got {value!r:.200}.") from None
    _refuse_infinite(found, where)  # a text may have become a number
    is_number = isinstance(found, bool) or not isinstance(value, bool)  # true may have become 1
    check_fit(is_number, where, "be a number", value)
    return found


def _expected(hint: Any, error: ValidationError) -> str:
    """Return a description of the values that a type allows, from the first fault for each member of a union."""
    several = len([each for each in _members(hint) if each is not NoneType]) > 1
    faults = {each["loc"][:1]: each for each in reversed(error.errors())} if several else {}
    said = [
        _EXPECTED.get(each["type"].partition("_")[0], each["msg"].removeprefix("Input should be "))
        for each in [*reversed(faults.values())] or error.errors()[:1]
    ]
    return " or ".join(dict.fromkeys(said))


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; for another type, the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _first_key(hint: Any) -> str:
    """Return the name of the first setting of the first dataclass in a type hint."""
    part = next(each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each))
    return dataclasses.fields(part)[0].name


def _typed(hint: Any, value: Any, where: str) -> Any:
    """Return a value of YAML as plain Python: its text if the field expects a text, else its value."""
    hints = _members(hint)
    if isinstance(value, Mapping):
        return _typed_mapping(hints, value, where)
    if isinstance(value, list | tuple):
        lists = (typing.get_args(each) for each in hints if typing.get_origin(each) in _LISTS)
        inner = next((args[0] for args in lists if args), Any)
        return [_typed(inner, each, f"{where}[{index}]") for index, each in enumerate(value)]
    meant, text = value_of(value), text_of(value)
    if text is not None and any(
        text in typing.get_args(each) for each in hints if typing.get_origin(each) is typing.Literal
    ):
        return text
    is_number = isinstance(meant, int) and not isinstance(meant, bool) and float in hints
    if str not in hints or isinstance(meant, str) or type(meant) in hints or is_number:
        return meant
    if text is None and isinstance(meant, bool | int | float | None):
        kinds = {bool: "a boolean", NoneType: "no value"}
        raise ConfigError(
            f"{where} must be text, got {json.dumps(meant)}, which YAML reads as {kinds.get(type(meant), 'a number')} "
            "where it stands without quotes; write it in quotes."
        )
    return meant if text is None else text


def _typed_mapping(hints: Sequence[Any], value: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """Return a mapping of YAML as plain Python, each value by the type that the field expects."""
    shape = next((each for each in hints if typing.is_typeddict(each)), None)
    inner = next((args for each in hints if len(args := typing.get_args(each)) == 2), (Any, Any))
    by_key = typing.get_type_hints(shape) if shape is not None else {}
    return {
        text_of(key) if inner[0] is str and text_of(key) is not None else value_of_key(key): _typed(
            by_key.get(key, inner[1]), each, _join(where, str(key))
        )
        for key, each in value.items()
    }


def _refuse_infinite(value: Any, where: str) -> None:
    """Reject numbers that are not finite, also in lists and mappings."""
    for path, _, _, each in _leaves(value, where):
        check_fit(not isinstance(each, float) or math.isfinite(each), path, "be a finite number", each)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def dotted(data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dictionary from dotted keys to values."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{where}.{key}" if where else str(key)
        value = list(value) if isinstance(value, tuple) else value
        flat |= dotted(value, name) if isinstance(value, Mapping) else {name: value}
    return flat
