"""Check that an environment implements the `Environment` Protocol, by playing scripted episodes."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perturn.envs.abilities import abilities_of
from perturn.envs.async_worlds import awaited
from perturn.envs.scripted_user import ScriptedUser
from perturn.envs.user_environment import OwnWorld, lacking, playable
from perturn.episodes.tool_calls import ToolAction, ToolCall, expert_action, write_action
from perturn.errors import by_reason
from perturn.faults import observation_faults, plain_observation
from perturn.io.plain_data import survives_json
from perturn.types import Environment, Observation, Task

_SCRIPT = ("xyzzy 123 \N{SNOWMAN}", "", "help", "look around", "a" * 2000, '{"broken": ')
_SHOWN = 60
_OURS = Path(__file__).parents[1]
"""Folder of Perturn; error messages quote only lines outside of it, in the user's code."""
_RAISED = object()


def check_environment(make: Callable[[], Any], split: str = "train", episodes: int = 2) -> list[str]:
    """Play scripted episodes in an environment and return its problems; an empty list means that all checks passed.

    After a problem, only the checks that depend on the failed method are skipped. So one call finds as many problems as
    possible. Problems that differ only in the task or in the action are reported once.

    Args:
        make: Function or class that makes the environment.
        split: Split whose tasks are played.
        episodes: Number of tasks to play. Each task is reset again with the same seed, to compare the first texts.

    Returns:
        One text per problem, with its likely cause and remedy.
    """
    found = _Problems()
    remedy = "let it be constructed without arguments, or give its settings, such as environment.size=4"
    made = found.attempt("make()", lambda: awaited(make()), remedy)
    if made is _RAISED:
        return found.texts()
    label = getattr(make, "__name__", type(made).__name__)
    found.say(lacking(made, label))
    environment = ScriptedUser(made if isinstance(made, OwnWorld) else OwnWorld(made, label))
    name: object = environment.name
    if not isinstance(name, str) or not name:
        found.add(
            f"name must be a text such as 'game-1.0', got {name!r}", "set it in the class, or leave it out"
        )
    if playable(made, "tasks"):
        tasks = _check_tasks(found, environment, split)[:episodes]
        if playable(made, "reset") and playable(made, "step"):
            for task in tasks:
                _check_episode(found, environment, task)
            if tasks and "expert" in abilities_of(environment):
                _check_expert(found, environment, tasks)
    found.attempt("close()", environment.close, "make it release what it holds without raising")
    return found.texts()


class _Problems:
    """Collected problems. Problems that differ only in numbers and names are reported together."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def texts(self) -> list[str]:
        """Return one text for each group of similar problems."""
        groups = by_reason(self._found, str)
        return [
            each[0] if len(each) == 1 else f"{each[0]} ({len(each) - 1} more of this kind.)"
            for each in groups
        ]

    def say(self, problems: Iterable[str]) -> None:
        """Add problems whose texts already contain a remedy."""
        self._found |= dict.fromkeys(problems)

    def add(self, problem: str, remedy: str) -> None:
        self.say([f"{problem}. Remedy: {remedy}."])

    def attempt(self, what: str, call: Callable[[], object], remedy: str) -> Any:
        """Call a function of the user's code; if it raises, add a problem and return `_RAISED`."""
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  user code may raise anything, also SystemExit
            frames = traceback.extract_tb(error.__traceback__)
            theirs = [each for each in frames if not Path(each.filename).is_relative_to(_OURS)]
            where = f" (line {theirs[-1].lineno} of {Path(theirs[-1].filename).name})" if theirs else ""
            problem = f"{what} raised {type(error).__name__}: {str(error).removesuffix('.')}{where}"
            if "Remedy:" in problem:
                self.say([f"{problem}."])
            else:
                self.add(problem, remedy)
            return _RAISED

    def observe(self, what: str, call: Callable[[], object], remedy: str) -> Observation | None:
        """Return the observation that a call returns; if its values have wrong types, add problems and return None."""
        answer = self.attempt(what, call, remedy)
        faults = [] if answer is _RAISED else observation_faults(answer)
        self.say(f"{what} returned {fault}" for fault in faults)
        return None if faults or answer is _RAISED else plain_observation(answer)


def _check_tasks(found: _Problems, environment: Environment, split: str) -> list[Task]:
    """Return the tasks of the split, and add a problem for each fault in them."""
    what = f"tasks({split!r})"
    tasks = found.attempt(what, lambda: list(environment.tasks(split)), "return a list")
    if tasks is _RAISED:
        return []
    if not tasks:
        found.add(f"{what} is empty: nothing can be played", "check the split's name and data")
    for task in tasks:
        if not isinstance(task, Task):
            found.add(
                f"{what} holds {_show(task)}", "return a list of values or of perturn.types.Task objects"
            )
            return []
    again = found.attempt(f"{what} again", lambda: list(environment.tasks(split)), "keep no state in it")
    if again is not _RAISED and again != tasks:
        found.add(
            f"{what} changed between two calls; probably its order comes from a shuffle or a file system",
            "sort",
        )
    ids = Counter(task.id for task in tasks)
    for key in [key for key, count in ids.items() if count > 1][:1]:
        found.add(f"{what} repeats the id {key!r}", "make ids unique, such as kind/number")
    for task in [task for task in tasks if not survives_json(dict(task.data))][:1]:
        found.add(
            f"data of task {task.id!r} does not survive JSON: {_show(task.data)}",
            "keep numbers, texts, lists and dicts with text keys in it, and derive the rest in reset()",
        )
    return list(tasks)


def _check_episode(found: _Problems, environment: Environment, task: Task) -> None:
    """Play a task, reset it again with the same seed, and add a problem for each fault."""
    first = _check_reset(found, environment, task)
    if first is None:
        return
    remedy = "answer an action that makes no sense with a text, or with Observation(text, valid=False)"
    for said in _SCRIPT:
        if first.tools and not said:
            continue  # with tools, an empty answer is not an action and never reaches the environment
        action = write_action(ToolAction(said)) if first.tools else said
        what = f"step({_show(action)}) of task {task.id!r}"
        seen = found.observe(what, partial(environment.step, action), remedy)
        if (seen is None or seen.terminated) and _check_reset(
            found, environment, task, " after an episode"
        ) is None:
            break
    if first.admissible:
        _check_admissible(found, environment, task)
    if first.tools:
        _check_tools(found, environment, task, first)
    again = _check_reset(found, environment, task, " after an episode")
    if again is not None and _words(again.text) != _words(first.text):
        found.add(
            f"reset({task.id!r}, seed=0) posed two texts: {_show(first.text)} and {_show(again.text)}; "
            "probably it draws from a global generator or keeps state",
            "derive chance from the seed",
        )


def _check_reset(
    found: _Problems, environment: Environment, task: Task, when: str = ""
) -> Observation | None:
    """Return the first observation of an episode; None if no step can follow. Add a problem for each fault."""
    what = f"reset({task.id!r}, seed=0){when}"
    remedy = "let it start an episode at any time, also after an ended or an unfinished one"
    answer = found.attempt(what, partial(environment.reset, task, 0), remedy)
    if answer is _RAISED:
        return None
    if faults := observation_faults(answer):
        found.say(f"{what} returned {fault}" for fault in faults)
        return Observation("")  # the steps after a faulty reset can still be checked
    posed: Observation = plain_observation(answer)
    if not posed.text.strip():
        found.add(f"{what} returned no text: the policy never sees the task", "pose it in the text")
    if posed.reward != 0:
        found.add(
            f"{what} returned the reward {posed.reward}, which belongs to no action and is not counted",
            "pay it with the first step",
        )
    if posed.terminated:
        found.add(
            f"{what} returned terminated=True: the episode ended before it began; probably the flag of the last "
            "episode is kept",
            "clear it in reset()",
        )
    return None if posed.terminated else posed


def _check_admissible(found: _Problems, environment: Environment, task: Task) -> None:
    """Check that the environment accepts the first and the last command of its `admissible` list."""
    for index in (0, -1):
        posed: Any = found.attempt("reset()", partial(environment.reset, task, 0), "see above")
        if posed is _RAISED or observation_faults(posed) or not posed.admissible or posed.terminated:
            return
        command = posed.admissible[index]
        what = f"step({_show(command)}) of task {task.id!r}, which is listed as admissible,"
        answer = found.observe(what, partial(environment.step, command), "list what step() understands")
        if answer is not None and not answer.valid:
            found.add(
                f"{what} returned valid=False; probably `admissible` is built for another state or in other words",
                "list exactly what step() understands now, or nothing",
            )


def _check_tools(found: _Problems, environment: Environment, task: Task, first: Observation) -> None:
    """Check that tool schemas have the form that chat templates expect, and that each call gets one text as result."""
    offers = f"reset({task.id!r}, seed=0) offers"
    functions: list[Any] = [tool.get("function") for tool in first.tools]
    names = [one.get("name") if isinstance(one, Mapping) else None for one in functions]
    if not all(isinstance(name, str) and name for name in names):
        found.add(
            f"{offers} {_show(first.tools[0])}, which is not a schema",
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, such as '
            "transformers.utils.get_json_schema makes of a function",
        )
        return
    if len(set(names)) < len(names):
        found.add(f"{offers} two tools of one name", "rename one")
    strange = ToolCall("no_such_tool", {"number": 1})
    for calls, said in (((strange,), "a tool that is not there"), ((strange, strange), "two calls at once")):
        what = f"a call of {said} in task {task.id!r}"
        if found.attempt("reset()", partial(environment.reset, task, 0), "see above") is _RAISED:
            return
        action = write_action(ToolAction("", calls))
        remedy = "answer it with a text in Observation.results and valid=False"
        answer = found.observe(what, partial(environment.step, action), remedy)
        if answer is None:
            return
        if len(answer.results) != len(calls) and not answer.terminated:
            found.add(
                f"{what} returned {len(answer.results)} results",
                "read the action with perturn.episodes.tool_calls.read_action and return one text per call, in their "
                "order",
            )


def _check_expert(found: _Problems, environment: Any, tasks: Sequence[Task]) -> None:
    """Check that the expert's actions are texts that solve at least one task."""
    solved = 0
    for task in tasks:
        what = f"expert({task.id!r})"
        actions = found.attempt(
            what, partial(environment.expert, task), "return a list of actions, as step() gets them"
        )
        if actions is _RAISED:
            return
        posed: Any = found.attempt(
            f"reset({task.id!r}, seed=0)", partial(environment.reset, task, 0), "see above"
        )
        if posed is _RAISED or observation_faults(posed):
            return
        seen: Observation | None = None
        for said in actions:
            action = write_action(expert_action(said)) if posed.tools else said
            seen = found.observe(
                f"step({_show(action)}) of {what}", partial(environment.step, action), "see above"
            )
            if seen is None or seen.terminated:
                break
        solved += seen is not None and bool(seen.success)
    if not solved:
        found.add(
            f"the actions of expert() solve none of {len(tasks)} tasks",
            "let the last of them return success=True, or a positive reward with done=True",
        )


def _words(text: str) -> list[str]:
    """Return the sorted words of a text, so that lists in another order compare as equal."""
    return sorted(re.findall(r"\w+", text))


def _show(value: object) -> str:
    """Return the `repr` of a value, cut to 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
