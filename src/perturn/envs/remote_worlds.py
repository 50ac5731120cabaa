"""Worlds in another process or on another machine; only plain data is exchanged.

Only texts, numbers, lists and dicts do, so nothing of an environment has to be understood, or even importable, on our
side. Torch is not imported here: a child starts in about 0.1 s.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

from perturn.config.sections import ProtocolSettings
from perturn.envs.abilities import ability, signatures
from perturn.envs.async_worlds import AwaitedWorld
from perturn.envs.user_environment import OwnWorld, attribute
from perturn.errors import (
    BystanderLost,
    ConfigError,
    DataError,
    EnvironmentFailure,
    PerturnError,
    WorldLost,
    check_belongs,
    check_fit,
    check_type,
)
from perturn.faults import UNAWAITED, is_unawaited, sound
from perturn.io import plain_data
from perturn.traits import Ability, EnvironmentTraits, Form, traits_of
from perturn.types import EpisodeProtocol, Observation, Task, UserTurn

RAISED: dict[str, type[PerturnError]] = {
    "setting": ConfigError,
    "data": DataError,
    "bystander": BystanderLost,
    "lost": WorldLost,
    "world": EnvironmentFailure,
}
"""Exceptions that a world elsewhere may raise on our side. None ends a run midway, and a world cannot name another."""
_WORDS = {
    "task": "a Task",
    "actions": "texts",
    "turns": "(thought, action) texts",
    "plain": "numbers, texts, lists or dicts with text keys",
}
"""Kinds of values, each in words."""


class Link(Protocol):
    """The way to a world elsewhere."""

    facts: dict[str, Any]
    """Name and abilities of the world, from `PlainWorld.facts`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the value of a method of `PlainWorld` there; where there is no world yet, one is started."""
        ...

    def close(self) -> None:
        """End the world; the next call starts another."""
        ...


class RemoteWorld:
    """Our side of a world elsewhere, as an `Environment`; it has the abilities that the world has there.

    Where the world is lost, that call raises `WorldLost`, and the next `reset` begins in another one. Not to be called
    from two threads at once.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.name: str = link.facts["name"]
        said: dict[str, dict[str, Any]] = link.facts["abilities"]
        self.traits = EnvironmentTraits(
            abilities={name: Ability(**each | {"takes": tuple(each["takes"])}) for name, each in said.items()}
        )

    def __getattr__(self, name: str) -> Any:
        if name != "traits" and not name.startswith("_") and name in self.traits.abilities:
            return partial(self._ability, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of a split."""
        return [Task(**task) for task in self._link.call("tasks", split)]

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode, in a fresh world if the last one is lost."""
        return _observation(self._link.call("reset", plain_task(task), seed))

    def step(self, action: str) -> Observation:
        """Take one action."""
        return _observation(self._link.call("step", action))

    def declared(self) -> Declared:
        """Return the rules that the world declares, as `declared_rules` returns them."""
        said: dict[str, list[Any]] = self._link.call("declared")
        return {key: (value, source) for key, (value, source) in said.items()}

    def close(self) -> None:
        """End the world. It may be used again."""
        self._link.close()

    def _ability(self, name: str, *arguments: Any) -> Any:
        signature = self.traits.abilities[name]
        forms = enumerate(zip(signature.takes, arguments, strict=True))
        given = [_packed(form, value, f"argument {n} of {name} must be") for n, (form, value) in forms]
        return _unpacked(signature.gives, self._link.call("ability", name, given))


class PlainWorld:
    """The other side: the calls of an `Environment` and of its abilities, with plain data in and out."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._playing = False

    def facts(self) -> dict[str, Any]:
        """Name and abilities of the world."""
        crossing = {name: each for name, each in signatures(self._env).items() if each.crosses}
        return {
            "name": self._env.name,
            "abilities": {name: dataclasses.asdict(each) for name, each in crossing.items()},
        }

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all tasks of a split."""
        tasks = self._env.tasks(split)
        if is_unawaited(tasks):
            raise EnvironmentFailure(f"tasks({split!r}) returned {UNAWAITED}")
        return [plain_task(task) for task in tasks]

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        """Start an episode."""
        self._playing = True
        return _plain_observation(sound(self._env.reset(Task(**task), seed), "reset"))

    def step(self, action: str) -> dict[str, Any]:
        """Take one action."""
        if not self._playing:  # the world that did is lost
            raise EnvironmentFailure("no episode is running: call reset before step.")
        return _plain_observation(sound(self._env.step(action), "step"))

    def ability(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call an optional method.

        Raises:
            EnvironmentFailure: If its result is not of the form that its signature says.
        """
        signature = signatures(self._env)[name]
        found = ability(self._env, name)(*map(_unpacked, signature.takes, arguments))
        if found is None and signature.or_none:
            return None
        return _packed(signature.gives, found, f"{name} must return")

    def declared(self) -> dict[str, list[Any]]:
        """Return the rules that the world declares."""
        return {key: list(each) for key, each in rules_of(self._env).items()}

    def close(self) -> None:
        """Release the resources of the world."""
        self._env.close()


def rules_of(environment: Any) -> Declared:
    """Return the rules that an environment declares, here or elsewhere, as `declared_rules` returns them."""
    return environment.declared() if isinstance(environment, RemoteWorld) else declared_rules(environment)


def told(error: BaseException) -> dict[str, str]:
    """Return the name of an exception in `RAISED`, and its message, with type and place if it is not Perturn's."""
    kind = next((kind for kind, each in RAISED.items() if isinstance(error, each)), None)
    text = plain_data.told(error)
    if kind is None:
        text = f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, PerturnError) and frames:
        last = frames[-1]
        text += f" (at {last.filename}:{last.lineno}, in {last.name}: {last.line})"
    return {"error": kind or "world", "text": plain_data.mended(text)}


def value_of(reply: dict[str, Any]) -> Any:
    """Return the value of a call of a world elsewhere; its exception is raised as one of `RAISED`."""
    if "error" not in reply:
        return reply["value"]
    raise RAISED[reply["error"]](reply["text"])


def survives_json(data: object) -> bool:
    """Return whether JSON gives back the same data."""
    try:
        return bool(json.loads(json.dumps(data, allow_nan=False)) == data)
    except (TypeError, ValueError, RecursionError):
        return False


def plain_task(task: Task) -> dict[str, Any]:
    """Return a task as JSON can carry it."""
    fields = _fields(Task, task) | {"data": dict(task.data)}
    if not survives_json(fields):
        raise EnvironmentFailure(
            f"data of task {task.id!r} does not survive JSON: {fields['data']!r:.200}; keep numbers, texts, lists and "
            "dicts with text keys in it (perturn check-env says more), or set worlds.processes=0."
        )
    return fields


def _fields(kind: type[Task | Observation], value: Task | Observation) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}


def _plain_observation(seen: Observation) -> dict[str, Any]:
    """Return an observation as plain data."""
    user = None if seen.user is None else dataclasses.asdict(seen.user)
    return _fields(Observation, seen) | {"user": user}


def _observation(fields: dict[str, Any]) -> Observation:
    """Return an observation from plain data; JSON has no tuples."""
    user = fields["user"] and UserTurn(**fields["user"] | {"heard": tuple(fields["user"]["heard"])})
    tuples = {key: tuple(fields[key]) for key in ("admissible", "tools", "results")}
    return Observation(**fields | tuples | {"user": user})


def _packed(form: Form, value: Any, what: str) -> Any:
    """Return a value as plain data."""
    listed = list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else value
    if form == "task" and isinstance(value, Task):
        return plain_task(value)
    if _fits(form, listed):
        return listed
    raise EnvironmentFailure(f"{what} {_WORDS[form]}, got {listed!r:.200}.")


def _fits(form: Form, value: Any) -> bool:
    """Return whether a value is of a form; no `Task` is looked at."""
    if form == "plain":
        return survives_json(value)
    if form == "actions":
        return _are_texts(value)
    return form == "turns" and isinstance(value, list) and all(_are_texts(t) and len(t) == 2 for t in value)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(each, str) for each in values)


def _unpacked(form: Form, value: Any) -> Any:
    """Return a value from plain data."""
    if value is None or form in ("actions", "plain"):
        return value
    return Task(**value) if form == "task" else [(thought, action) for thought, action in value]


_ATTRIBUTES = {"format": str, "max_turns": int, "system": str}
"""Settings of a protocol that a class may have as its own attributes, and their types."""
_EXPECTED = {str: "text", int: "a whole number"}
_SECTION = re.compile(
    r"\n\s*(Args|Attributes|Examples?|Notes?|Raises|Returns|See Also|Todo|Usage)s?:?\s*\n", re.IGNORECASE
)
"""Where a docstring turns from the game to its code."""

Declared = dict[str, tuple[Any, str]]
"""Setting of a protocol -> its value, and where the value comes from."""


def declared_rules(env: Any) -> Declared:
    """Return the settings of a protocol that an environment declares.

    Of each setting the first that is there counts: the attribute of that name, the class's `protocol` (a name, an
    `EpisodeProtocol` or a dict of settings), and for `system` the docstring of the user's class.

    Raises:
        ConfigError: If the class's `protocol` is something else, or an attribute is a value of another type.
    """
    found: Declared = {}
    for one in reversed(_layers(env)):
        label = type(one).__name__
        protocol = traits_of(one).protocol or attribute(one, "protocol")
        found |= {key: (value, f"protocol of {label}") for key, value in _settings(protocol, label).items()}
        for key, kind in _ATTRIBUTES.items():
            value = attribute(one, key)
            fits = isinstance(value, kind) and not isinstance(value, bool)
            other = not isinstance(value, str | int | float)  # such as a method of that name
            check_fit(fits or other, f"{key} of {label}", f"be {_EXPECTED[kind]}", value)
            if fits:
                found[key] = (value, f"{key} of {label}")
        if "system" not in found and "name" not in found and (text := _docstring(type(one))):
            found["system"] = (text, f"docstring of {label}")
    return found


def _layers(env: Any) -> list[Any]:
    """Return the user's object, and the adapters around it, from within."""
    while isinstance(env, AwaitedWorld | OwnWorld):
        env = env.played
    inner = env.played if traits_of(env).adapts else None
    return [env] if inner is None else [inner, env]


def _settings(protocol: Any, label: str) -> dict[str, Any]:
    """Return the settings of a class's `protocol`."""
    if protocol is None:
        return {}
    if isinstance(protocol, str):
        return {"name": protocol}
    if isinstance(protocol, EpisodeProtocol):
        only = ("max_turns_by_kind", "sampling", "turns")
        named = {key: getattr(protocol, key) for key in only}
        remedy = 'register it as an entry point "perturn.protocols" and set the attribute to its name'
        check_belongs(named, False, f"a named protocol, and the protocol of {label} has no name", remedy)
        given = {each.name: getattr(protocol, each.name) for each in fields(ProtocolSettings)}
        whole = {"history": "full" if protocol.history is None else protocol.history}
        return given | whole | {"example": list(protocol.example)}
    expected = "the name of a protocol, a dict of its settings or an EpisodeProtocol"
    check_type(f"protocol of {label}", protocol, Mapping, expected)
    return dict(protocol)


def _docstring(kind: type) -> str:
    """Return the part of the docstring of a user's class that is on the game; empty where there is none."""
    text = kind.__dict__.get("__doc__") or ""
    if kind.__module__.partition(".")[0] == "perturn" or text.startswith(f"{kind.__name__}("):
        return ""  # an adapter of ours, or what a dataclass writes by itself
    return _SECTION.split(f"{inspect.cleandoc(text)}\n", maxsplit=1)[0].strip()
