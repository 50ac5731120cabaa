"""Write a recipe to start from: every setting there is, with its own documentation as the comment."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from perturn.bounds import texts
from perturn.envs import ENVIRONMENTS
from perturn.envs.load import environment_maker
from perturn.errors import ConfigError, did_you_mean
from perturn.faults import closing_world
from perturn.io.writing import write_whole
from perturn.run.own_rules import EVALUATION_SPLITS
from perturn.settings.parsing import apply_overrides, parse
from perturn.settings.recipe import Recipe, read_recipe
from perturn.settings.sections import Lora
from perturn.settings.shipped import shipped, shipped_recipe
from perturn.tables import table

_TABLES = {"loss": "losses", "credit": "credits", "engine": "engines", "environment": "environments"}
"""Sections whose `name` picks an entry, whose settings are theirs."""
_MOST_TASKS = 10
_LEFT_OUT = {(Recipe, "base")}
"""Sections that a recipe for a model that is there has no use for."""
_WIDTH = 110


def write_recipe(
    file: Path,
    *,
    environment: str,
    model: str,
    loss: str = "tlm-dre",
    lora: bool = False,
    overrides: Sequence[str] = (),
) -> None:
    """Write a recipe that runs as it is, to be changed.

    Args:
        file: Where to; it must not exist.
        environment: A name of `ENVIRONMENTS`, or MODULE:CLASS.
        model: Hub id, local folder, or a bundled name.
        loss: Of the alignment.
        lora: Train adapters instead of all weights.
        overrides: `key=value` words that replace what would be chosen.

    Raises:
        ConfigError: If the file exists, or there is no such loss or environment.
    """
    if file.exists():
        raise ConfigError(f"{file} exists and is left as it is; choose another name, or remove it.")
    losses = table("losses")
    if loss not in losses or not losses[loss].needs_rejected:
        fitting = [name for name, each in losses.items() if each.needs_rejected]
        raise ConfigError(f"unknown loss {loss!r} for an alignment.{did_you_mean(loss, fitting)}")
    world: dict[str, Any] = {"environment": {"name": environment}}
    apply_overrides(world, [word for word in overrides if word.startswith("environment.")])
    chosen = _chosen(file.stem, world["environment"], model, loss, lora)
    apply_overrides(chosen, overrides)
    settings = "\n".join(_fields(Recipe, parse(Recipe, chosen), chosen, ""))
    write_whole(file, f"{_header(file, environment, model)}{settings}\n")
    read_recipe(file)


def copy_recipe(file: Path, name: str) -> None:
    """Copy a recipe that comes with the package, comments and all.

    Raises:
        ConfigError: If the file exists, or there is no such recipe.
    """
    if file.exists():
        raise ConfigError(f"{file} exists and is left as it is; choose another name, or remove it.")
    found = shipped_recipe(name)
    if found is None:
        raise ConfigError(f"no recipe {name!r} comes with the package.{did_you_mean(name, shipped())}")
    write_whole(file, found.read_text(encoding="utf-8"))


def _chosen(name: str, environment: dict[str, Any], model: str, loss: str, lora: bool) -> dict[str, Any]:
    """The settings that differ from the defaults, or that everybody should look at."""
    taught, explored, evaluated = _panels(environment)
    small = model == "smollm2-135m"
    most = 32 if small else 128
    training: dict[str, Any] = {"batch_size": 4}
    if small:
        training["token_budget"] = 1024  # for machines with little memory
    if lora:
        training |= {"lora": dataclasses.asdict(Lora()), "gradient_checkpointing": True}
    return {
        "name": name,
        "model": {"name": model},
        "environment": dict(environment),
        "protocol": _protocol(str(environment["name"]), "action" if small else "react"),
        "sft": {
            "loss": {"name": "sft"},
            "tasks": taught,
            "epochs": 2,
            "learning_rate": 1e-4 if small or lora else 2e-5,
            **training,
        },
        "explore": {"tasks": explored, "sampling": {"temperature": 1.0, "max_new_tokens": most}},
        "pair": {"threshold": 0.4},
        "align": {
            "loss": {"name": loss},
            "epochs": 1,
            "learning_rate": 3e-6 if small else 1e-5 if lora else 1e-6,
            **training,
        },
        "evaluate": {"tasks": evaluated, "sampling": {"temperature": 0.0, "max_new_tokens": most}},
        "seed": 0,
    }


def _panels(environment: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Panels to teach, explore and evaluate that the environment has the tasks for."""
    with closing_world(environment_maker(environment)()) as env:
        half = min(_per_kind(env, "train") // 2, _MOST_TASKS)
        split = next((each for each in EVALUATION_SPLITS if _per_kind(env, each)), "train")
        evaluated = min(_per_kind(env, split), _MOST_TASKS)
    if not half:
        raise ConfigError(
            f"environment {environment['name']!r} has a kind with fewer than 2 tasks in split 'train', so that "
            "none could be taught and another explored; restrict its kinds in a recipe of your own."
        )
    return (
        {"split": "train", "per_kind": half},
        {"split": "train", "per_kind": half, "skip": half},
        {"split": split, "per_kind": evaluated},
    )


def _per_kind(env: Any, split: str) -> int:
    """Tasks of the kind that has fewest; 0 if there is no such split."""
    try:
        counts = Counter(task.kind for task in env.tasks(split))
    except Exception:  # noqa: BLE001  environments are code of others; here we only ask what there is
        return 0
    return min(counts.values(), default=0)


def _protocol(environment: str, form: str) -> dict[str, Any]:
    """The named protocol of an environment, or rules to fill in."""
    named = getattr(ENVIRONMENTS.get(environment), "protocol", None)
    if named:
        return {"name": named, "format": form}
    return {
        "name": "own-rules",
        "format": form,
        "system": "Say here what the agent can do and how it acts.",
        "max_turns": 30,
    }


def _header(file: Path, environment: str, model: str) -> str:
    return (
        f"# {model} on {environment}.\n"
        f"# Command:  perturn run {file}   (first: perturn run {file} --dry-run)\n"
        "# Hardware: not measured yet\n"
        "# Time:     not measured yet\n"
        "# Result:   not measured yet\n"
        "#\n"
        "# Lines with a key right after # are defaults: take the # away, and that of their section, to change them.\n"
        "# Learning rates and panels are places to start from, not results.\n"
    )


def _fields(
    kind: Any,
    value: Any,
    chosen: Mapping[str, Any],
    indent: str,
    live: bool = True,
    may_be_empty: bool = False,
) -> Iterator[str]:
    """All fields of a settings class: those chosen as they are, the others as commented defaults."""
    active = set(chosen)
    names = [name for name in _defaults(kind) if (kind, name) not in _LEFT_OUT]
    if live and not active and not may_be_empty:
        active = {names[0]}  # a section must not be empty
    for name in names:
        item = value[name] if isinstance(value, Mapping) else getattr(value, name)
        yield from _comment(_documentation(kind).get(name, ""), indent)
        yield from _field(kind, name, item, chosen.get(name), indent, live and name in active)
        if not indent:
            yield ""


def _field(kind: Any, name: str, value: Any, chosen: Any, indent: str, live: bool) -> Iterator[str]:
    """One field, with the fields inside it if it is a section."""
    mark = "" if live else "#"
    inner = _inner(kind, name)
    if name in _TABLES and isinstance(value, Mapping):
        entry = table(_TABLES[name]).get(str(value["name"]))
        yield f"{indent}{mark}{name}:"
        yield f"{indent}  {mark}name: {_yaml(value['name'])}"
        if entry is None:  # an environment of yours: its settings are not ours to explain
            yield from (
                f"{indent}  {mark}{key}: {_yaml(item)}" for key, item in value.items() if key != "name"
            )
        else:
            defaults = {**_defaults(entry), **value}
            own = {key: item for key, item in (chosen or {}).items() if key in defaults and key != "name"}
            yield from _fields(entry, defaults, own, f"{indent}  ", live, may_be_empty=True)
    elif inner is not None:
        yield f"{indent}{mark}{name}:"
        if value is None and dataclasses.MISSING not in _defaults(inner).values():
            value = inner()
        if value is not None:
            yield from _fields(inner, value, chosen or {}, f"{indent}  ", live)
    else:
        yield f"{indent}{mark}{name}: {_yaml(value)}"


def _inner(kind: Any, name: str) -> Any:
    """The settings class of a field that is a section of its own."""
    hint = get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return next((part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)), None)


def _defaults(kind: Any) -> dict[str, Any]:
    """Settings of a class and their defaults."""
    if dataclasses.is_dataclass(kind):
        return {
            each.name: each.default_factory() if callable(each.default_factory) else each.default
            for each in dataclasses.fields(kind)
        }
    return {name: item.default for name, item in inspect.signature(kind).parameters.items()}


def _documentation(kind: Any) -> dict[str, str]:
    """Meaning of each setting, from the text below its field or from the Args of the constructor."""
    if dataclasses.is_dataclass(kind):
        return texts(kind)
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(kind.__init__) or "").partition("Args:\n")[2].splitlines():
        if not line.strip():
            break
        key, colon, text = line.strip().partition(": ")
        if colon and key.isidentifier() and line.startswith("    ") and not line.startswith("     "):
            name, found[key] = key, text
        elif name:
            found[name] += f" {line.strip()}"
    return found


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), _WIDTH - len(indent)):
        yield f"{indent}# {line}"


def _yaml(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(
        list(value) if isinstance(value, tuple) else value,
        default_flow_style=True,
        width=10_000,
        sort_keys=False,
    )
    return text.strip().removesuffix("\n...").strip()
