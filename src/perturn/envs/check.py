"""Does an environment keep the contract? Plays scripted episodes and says in sentences what it found."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from perturn.episodes.tool_calls import ToolAction, ToolCall, write_action
from perturn.faults import observation_faults
from perturn.types import Environment, Observation, Task

_METHODS = ("tasks", "reset", "step", "close")
_SCRIPT = ("xyzzy 123 \N{SNOWMAN}", "", "help", "look around", "a" * 2000, '{"broken": ')
_SHOWN = 60
_RAISED = object()


def check_environment(make: Callable[[], Environment], split: str = "train", episodes: int = 2) -> list[str]:
    """Play scripted episodes against an environment and return its problems; an empty list is a pass.

    Args:
        make: Makes the environment, such as its class.
        split: Split whose tasks are played.
        episodes: How many tasks to play; each is started twice with one seed.

    Returns:
        One text a problem, with its likely cause and remedy.
    """
    problems: list[str] = []
    environment = _attempt(problems, "make()", make, "let it be constructed without arguments")
    if environment is _RAISED:
        return problems
    problems += _missing_parts(environment)
    if problems:
        return problems
    for task in _check_tasks(problems, environment, split)[:episodes]:
        _check_episode(problems, environment, task)
    _attempt(problems, "close()", environment.close, "make it release what it holds without raising")
    return list(dict.fromkeys(problems))


def _attempt(problems: list[str], what: str, call: Callable[[], object], remedy: str) -> Any:
    """Result of a call into the user's code, or `_RAISED` and a problem if it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the code of others begins here
        problems.append(f"{what} raised {type(error).__name__}: {error}. Remedy: {remedy}.")
        return _RAISED


def _missing_parts(environment: Environment) -> list[str]:
    """Problems with the attributes the contract names."""
    problems = [
        f"Method {method}() is missing. Remedy: define it as in perturn.types.Environment."
        for method in _METHODS
        if not callable(getattr(environment, method, None))
    ]
    name: object = getattr(environment, "name", None)
    if not isinstance(name, str) or not name:
        problems.append(f"name must be a text such as 'game-1.0', got {name!r}. Remedy: set it in the class.")
    return problems


def _check_tasks(problems: list[str], environment: Environment, split: str) -> list[Task]:
    """The tasks of the split, after noting what is wrong with them."""
    what = f"tasks({split!r})"
    tasks = _attempt(problems, what, lambda: list(environment.tasks(split)), "return a list of Task")
    if tasks is _RAISED:
        return []
    if not tasks:
        problems.append(f"{what} is empty: nothing can be played. Remedy: check the split's name and data.")
    for task in tasks:
        if not isinstance(task, Task):
            problems.append(f"{what} holds {_show(task)}. Remedy: return perturn.types.Task objects.")
            return []
    again = _attempt(problems, f"{what} again", lambda: list(environment.tasks(split)), "keep no state in it")
    if again is not _RAISED and again != tasks:
        problems.append(
            f"{what} changed between two calls; probably its order comes from a set, a file system or a "
            "shuffle. Remedy: sort."
        )
    repeated = [key for key, count in Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        problems.append(
            f"{what} repeats the id {repeated[0]!r}. Remedy: make ids unique, such as kind/number."
        )
    opaque = [task for task in tasks if not _round_trips(dict(task.data))]
    if opaque:
        problems.append(
            f"data of task {opaque[0].id!r} does not survive JSON: {_show(opaque[0].data)}. Remedy: keep "
            "numbers, texts, lists and dicts with text keys in it, and derive the rest in reset()."
        )
    return list(tasks)


def _round_trips(data: dict[str, object]) -> bool:
    """Whether JSON gives back the same data."""
    try:
        return bool(json.loads(json.dumps(data, allow_nan=False)) == data)
    except (TypeError, ValueError, RecursionError):
        return False


def _check_episode(problems: list[str], environment: Environment, task: Task) -> None:
    """Play a task twice with one seed and note what goes wrong."""
    first = _check_reset(problems, environment, task)
    if first is None:
        return
    remedy = "answer an action that makes no sense with Observation(text, valid=False)"
    for action in _SCRIPT:
        what = f"step({_show(action)}) of task {task.id!r}"
        observation = _attempt(problems, what, partial(environment.step, action), remedy)
        if not _is_sound(problems, what, observation) or observation.terminated:
            break
    if first.admissible:
        _check_admissible(problems, environment, task)
    if first.tools:
        _check_tools(problems, environment, task, first)
    again = _check_reset(problems, environment, task, " after an episode")
    if again is not None and _words(again.text) != _words(first.text):
        problems.append(
            f"reset({task.id!r}, seed=0) posed two texts: {_show(first.text)} and {_show(again.text)}; "
            "probably it draws from a global generator or keeps state. Remedy: derive chance from the seed."
        )


def _check_reset(
    problems: list[str], environment: Environment, task: Task, when: str = ""
) -> Observation | None:
    """The first observation of an episode if it can be played on."""
    what = f"reset({task.id!r}, seed=0){when}"
    remedy = "let it start an episode at any time, also after an ended or an unfinished one"
    observation: Any = _attempt(problems, what, lambda: environment.reset(task, 0), remedy)
    if not _is_sound(problems, what, observation):
        return None
    posed: Observation = observation
    if not posed.text.strip():
        problems.append(
            f"{what} returned no text: the policy never sees the task. Remedy: pose it in the text."
        )
    if posed.reward != 0:
        problems.append(
            f"{what} returned the reward {posed.reward}, which belongs to no action and is not counted. "
            "Remedy: pay it with the first step."
        )
    if posed.terminated:
        problems.append(
            f"{what} returned terminated=True: the episode ended before it began; probably the flag of the "
            "last episode is kept. Remedy: clear it in reset()."
        )
        return None
    return posed


def _check_admissible(problems: list[str], environment: Environment, task: Task) -> None:
    """Whether the world understands what it says it would: the first and the last of its commands."""
    for index in (0, -1):
        posed: Any = _attempt(problems, "reset()", lambda: environment.reset(task, 0), "see above")
        if posed is _RAISED or observation_faults(posed) or not posed.admissible or posed.terminated:
            return
        command = posed.admissible[index]
        what = f"step({_show(command)}) of task {task.id!r}, which is listed as admissible,"
        answer = _attempt(problems, what, partial(environment.step, command), "list what step() understands")
        if _is_sound(problems, what, answer) and not answer.valid:
            problems.append(
                f"{what} returned valid=False; probably `admissible` is built for another state or in other words. "
                "Remedy: list exactly what step() understands now, or nothing."
            )


def _check_tools(problems: list[str], environment: Environment, task: Task, first: Observation) -> None:
    """Whether schemas are in the chat-template form, and calls are answered, one text each."""
    functions: list[Any] = [tool.get("function") for tool in first.tools]
    names = [one.get("name") for one in functions if isinstance(one, Mapping)]
    if len(names) < len(functions) or not all(isinstance(name, str) and name for name in names):
        problems.append(
            f"reset({task.id!r}, seed=0) offers {_show(first.tools[0])}, which is no schema. Remedy: "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, such as '
            "transformers.utils.get_json_schema makes of a function."
        )
        return
    if len(set(names)) < len(names):
        problems.append(f"reset({task.id!r}, seed=0) offers two tools of one name. Remedy: rename one.")
    strange = ToolCall("no_such_tool", {"number": 1})
    for calls, what in (((strange,), "a tool that is not there"), ((strange, strange), "two calls at once")):
        problem = f"a call of {what} in task {task.id!r}"
        if _attempt(problems, "reset()", lambda: environment.reset(task, 0), "see above") is _RAISED:
            return
        action = write_action(ToolAction("", calls))
        remedy = "answer it with a text in Observation.results and valid=False"
        answer = _attempt(problems, problem, partial(environment.step, action), remedy)
        if not _is_sound(problems, problem, answer):
            return
        if len(answer.results) != len(calls) and not answer.terminated:
            problems.append(
                f"{problem} returned {len(answer.results)} results. Remedy: read the action with "
                "perturn.episodes.tool_calls.read_action and return one text a call, in their order."
            )


def _is_sound(problems: list[str], what: str, observation: Any) -> bool:
    """Whether an answer is an Observation with values of the right kinds; notes why not."""
    if observation is _RAISED:
        return False
    found = observation_faults(observation)
    problems += [f"{what} returned {problem}" for problem in found]
    return not found


def _words(text: str) -> list[str]:
    """Words in any order: a simulator that lists a set in another order poses the same task."""
    return sorted(re.findall(r"\w+", text))


def _show(value: object) -> str:
    """A value as Python writes it, cut to fit into a sentence."""
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
