"""BFCL multi-turn: a user makes several requests, and the policy answers each by calling tools of simulated services.

Patil et al. 2025, "The Berkeley Function Calling Leaderboard". The environment needs `pip install "perturn[bfcl]"` and
`pip install --no-deps bfcl-eval==2026.3.23`. `bfcl-eval` contains the simulators, tasks and gold calls.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from math import ceil
from typing import Annotated, Any, ClassVar

from perturn.bounds import PATH
from perturn.envs.benchmark import NO_EPISODE, check_known, choose_kinds, short_hash
from perturn.envs.bfcl.data import (
    CATEGORIES,
    CLASSES,
    Entry,
    Matched,
    module_of,
    package_data,
    read_call,
    read_entries,
    schemas,
)
from perturn.episodes.tool_calls import ToolAction, ToolCall, read_action, write_action
from perturn.errors import DataError, EnvironmentFailure, check_fit, did_you_mean
from perturn.io.read_input import user_path
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task

_VERSION = "bfcl-multi-turn-2"
STEP_LIMIT = 20
"""Largest number of actions with tool calls per request. The next such action is executed and ends the task."""
REWARDS = ("success", "f1")
"""Reward settings. `success`: 1 if every request was met, else 0. `f1`: F1 score of the calls and the gold calls."""
_SPLITS = ("all", "train", "test")
_STATELESS = frozenset({"MathAPI"})
_NO_ACTION = "That is not an action: call tools, or write a message to the user."


class Bfcl:
    """BFCL multi-turn as an `Environment` and an `Expert`; play it under `protocol.format=tools`.

    An action either calls tools, whose calls are executed in order, or is a message to the user. A message ends the
    work on the current request. The next request is the observation after it, and the episode ends after the last
    request.

    The reward `success` is 1 at the end if every request was met, else 0. BFCL makes two checks after each request.
    First, the public state of the simulators must equal the state after the gold calls. Second, the results of the
    request's gold calls must be among all results so far, in any order. A request with gold calls also needs at least
    one call. A request without gold calls is not checked. More than `STEP_LIMIT` actions with calls for one request end
    the task. The reward is then 0, except in the last request, which is checked as usual.

    The reward `f1` is Perturn's own. The reward of a turn is the change of the F1 score in that turn. So the rewards of
    an episode sum to the F1 score of all its calls: F1 = 2 S / (P + G), with P calls and G gold calls. S is the largest
    sum of similarities (`call_similarity`) over one-to-one matchings. A malformed action is no call, since it does not
    reach the environment. Success is the same under both rewards.

    Differs from BFCL: Calls are executed by name with JSON arguments and never evaluated as Python. Only offered tools
    can be called. The error texts of unknown tools and wrong arguments are Perturn's. Schemas do not describe return
    values. A malformed call is answered with a reminder, while BFCL takes it for a message. The split `all` is BFCL's
    test set of 200 tasks. `test` is every fifth task and `train` the rest. Perturn defines these two splits for
    training. Scores on them are not comparable with BFCL's.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        protocol="bfcl-multi-turn", distributions=("bfcl-eval",)
    )

    def __init__(
        self,
        category: str = "base",
        data: Annotated[str | None, PATH] = None,
        classes: tuple[str, ...] = (),
        reward: str = "success",
    ) -> None:
        """Read the tasks.

        Args:
            category: `base`, `miss_param` or `long_context`.
            data: Folder in the layout of `bfcl_eval/data`. None: the folder of the installed package.
            classes: Simulators, such as `TradingBot`. Only tasks that need no other simulator are listed. Fewer
                simulators make prompts shorter. Empty: all 8.
            reward: `success` or `f1`.
        """
        why = "Its tools change in the middle of a task." if category == "miss_func" else ""
        check_fit(category in CATEGORIES, "category", f"be one of {', '.join(CATEGORIES)}", category, why)
        self._long_context = category == "long_context"
        installed = package_data()
        self._folder = user_path(data, "environment.data") if data is not None else installed
        self._entries = read_entries(self._folder, category)
        self.classes = choose_kinds(classes, CLASSES, "bfcl", what="class", setting="classes")
        self.reward = check_known("reward", reward, REWARDS, "bfcl")
        if reward == "f1":
            _check_gold(self._entries.values())
        marked = "" if reward == "success" else f"-{reward}"
        self.name = f"{_VERSION}-{category}{marked}-{metadata.version('bfcl-eval')}"
        self._entry: Entry | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split that need only the chosen simulators, in BFCL's order.

        The kind of a task is its alphabetically first simulator.
        """
        check_known("split", split, _SPLITS, "bfcl")
        return [
            Task(id=entry.id, kind=min(entry.classes), split=split)
            for number, entry in enumerate(self._entries.values())
            if (split == "all" or (number % 5 == 0) is (split == "test"))
            and set(self.classes).issuperset(entry.classes)
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start new services and return the first request; the seed has no effect."""
        self._entry = entry = self._find(task)
        self._model, self._gold = (_Services(entry, self._long_context) for _ in range(2))
        self._turn, self._steps, self._failed = 0, 0, False
        self._returned: Counter[str] = Counter()
        self._matched = Matched(_gold_calls(entry, self._gold.methods))
        return self._seen(entry.requests[0], tools=schemas(self._folder, entry))

    def step(self, action: str) -> Observation:
        """Execute the tool calls of an action, or end the current request with a message."""
        if self._entry is None:
            raise EnvironmentFailure(NO_EPISODE)
        said = read_action(action)
        if said is None or not (said.calls or said.text.strip()):
            return self._seen(_NO_ACTION, valid=False)
        seen = self._call(self._entry, said) if said.calls else self._end_turn(self._entry)
        return replace(seen, reward=self._matched.add(said.calls)) if self.reward == "f1" else seen

    def _call(self, entry: Entry, said: ToolAction) -> Observation:
        """Execute the calls of an action; end the episode if the request has taken more than `STEP_LIMIT` actions."""
        self._steps += 1
        results, valid = zip(*map(self._model.call, said.calls), strict=True)
        self._returned.update(results)
        if self._steps <= STEP_LIMIT:
            return self._seen("", valid=all(valid), results=results)
        last = self._turn + 1 == len(entry.requests)
        self._failed |= not last or not self._is_met(entry.gold[self._turn])
        return self._end(valid=all(valid), results=results)

    def expert(self, task: Task) -> Sequence[str]:
        """Return the gold calls as actions, with a message after each request's calls.

        An action has one call, or more if the request has more than `STEP_LIMIT` gold calls.
        """
        entry = self._find(task)
        methods = _Services(entry, self._long_context).methods
        actions: list[ToolAction] = []
        for calls in entry.gold:
            size = max(1, ceil(len(calls) / STEP_LIMIT))
            actions += [
                ToolAction("", tuple(read_call(call, methods) for call in calls[start : start + size]))
                for start in range(0, len(calls), size)
            ]
            actions.append(
                ToolAction("That is done." if calls else "I need to know more before I can do that.")
            )
        return [write_action(action) for action in actions]

    def close(self) -> None:
        """Release the services."""
        self._entry = None

    def _find(self, task: Task) -> Entry:
        if task.id not in self._entries:
            raise EnvironmentFailure(
                f"{self.name} has no task {task.id!r}.{did_you_mean(task.id, self._entries)}"
            )
        return self._entries[task.id]

    def _end_turn(self, entry: Entry) -> Observation:
        """Check the calls that answered a request, and return the next request."""
        self._failed |= not self._is_met(entry.gold[self._turn])
        self._turn, self._steps = self._turn + 1, 0
        if self._turn < len(entry.requests):
            return self._seen(entry.requests[self._turn])
        return self._end()

    def _end(self, **rest: Any) -> Observation:
        """End the episode, with reward 1 if every request was met."""
        self._entry = None
        return Observation(
            "", reward=float(not self._failed), terminated=True, success=not self._failed, **rest
        )

    def _is_met(self, gold: Sequence[str]) -> bool:
        """Return whether the current request passes BFCL's checks."""
        if not gold:
            return True
        results = Counter(self._gold.call(read_call(call, self._gold.methods))[0] for call in gold)
        same = self._model.state() == self._gold.state()
        return self._steps > 0 and same and results <= self._returned

    def _seen(self, text: str, **rest: Any) -> Observation:
        key = repr([self._turn, {name: repr(value) for name, value in self._model.state().items()}])
        return Observation(text, state_key=short_hash(key), **rest)


def _check_gold(entries: Iterable[Entry]) -> None:
    """Raise `DataError` if a task has no gold calls, since its F1 score is then undefined."""
    for entry in entries:
        if not any(entry.gold):
            raise DataError(
                f"task {entry.id!r:.80} has no gold calls; leave it out, or set environment.reward=success."
            )


def _gold_calls(entry: Entry, methods: Mapping[str, Any]) -> list[ToolCall]:
    """Return the gold calls of all requests, in order."""
    return [read_call(call, methods) for calls in entry.gold for call in calls]


class _Services:
    """The simulated services of one task, and their tools."""

    def __init__(self, entry: Entry, long_context: bool) -> None:
        self._services: dict[str, Any] = {}
        self.methods: dict[str, Callable[..., Any]] = {}
        for name in entry.classes:
            service = getattr(importlib.import_module(module_of(name)), name)()
            if name not in _STATELESS:
                service._load_scenario(copy.deepcopy(entry.config.get(name, {})), long_context=long_context)
            self._services[name] = service
            self.methods |= {
                key: method
                for key, method in inspect.getmembers(service, inspect.ismethod)
                if not key.startswith("_") and key not in entry.excluded
            }

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the public attributes of each service."""
        return {
            name: {key: value for key, value in vars(service).items() if not key.startswith("_")}
            for name, service in self._services.items()
        }

    def call(self, call: ToolCall) -> tuple[str, bool]:
        """Execute a call; return its result in BFCL's wording, and whether a tool with such arguments exists."""
        try:
            method = self.methods[call.name]
            inspect.signature(method).bind(**call.arguments)
        except KeyError:
            return f"Error during execution: there is no tool {call.name!r}", False
        except TypeError as error:
            return f"Error during execution: {call.name}: {error}", False
        try:
            result = method(**copy.deepcopy(dict(call.arguments)))
            text = str(result)  # fails for a number of more than 4300 digits
        except Exception as error:  # noqa: BLE001  a simulator may raise anything on a model's arguments
            return f"Error during execution: {error}", True
        try:
            return (json.dumps(result) if isinstance(result, dict) else text), True
        except (TypeError, ValueError):
            return text, True
