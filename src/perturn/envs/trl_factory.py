"""Adapter for classes written for TRL's `environment_factory`: `reset(**row)`, public methods as tools, `get_reward()`.

The same class works unchanged in `trl.GRPOTrainer(environment_factory=...)`. The interface follows TRL 1.16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, ClassVar

from perturn.bounds import CODE, MAYBE_PATH, ROWS, OneOf
from perturn.envs.adapter_values import as_number, schema_of
from perturn.envs.async_worlds import WorldLoop
from perturn.envs.json_rows import numbered_rows
from perturn.episodes.tool_calls import ToolCall, read_action
from perturn.errors import EnvironmentFailure, check_known, required
from perturn.io.read_input import user_path
from perturn.io.user_code import load_object
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task

_NO_ACTION = "That is not an action: call tools, or write your answer."
_NEEDED = {
    "reset": "it begins an episode",
    "get_reward": "reward functions outside of the class stay in TRL, so here the class must own its reward",
}
"""Public method that is not a tool -> its purpose."""


class TrlFactory:
    """A class for TRL's `environment_factory` as an `Environment`; play it under `protocol.format=tools`.

    A task is a row of the dataset that TRL would train on. The first observation is the row's `prompt`, followed by the
    result of `reset(**row)`. Public methods are the tools; transformers makes their schemas from their docstrings. If a
    tool raises an exception, the message is its result, as in TRL. An answer without tool calls ends the episode.
    Tools, `reset` and `get_reward` may be `async def`. All of them share one event loop, so a connection stays open
    between calls.

    The rewards of an episode sum to the last value of `get_reward()`. By default it is called after each action, so
    that an episode cut off by a turn limit gets the same reward as in TRL. TRL calls it only once per episode. If a
    call is expensive, such as with a paid judge, set `ask_reward: end`; a cut-off episode then gets reward 0.
    """

    format: ClassVar[str] = "tools"
    system: ClassVar[str] = ""
    """Empty, since TRL adds no system text."""

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(adapts=True)

    def __init__(
        self,
        make: Annotated[str, CODE],
        rows: Annotated[Mapping[str, str], ROWS],
        settings: Annotated[Mapping[str, Any] | None, MAYBE_PATH] = None,
        ask_reward: Annotated[str, OneOf(("each", "end"))] = "each",
        success_reward: float = 1.0,
        version: str = "",
    ) -> None:
        """Make one object of the class and read the rows.

        Args:
            make: Class or other factory that TRL's `environment_factory` accepts, written `module:Class`.
            rows: Split -> file or folder of rows, or a data set of the Hub. The key `prompt` of a row is a text or a
                list with one user message. All keys are passed to `reset`.
            settings: Keyword arguments of the callable.
            ask_reward: When `get_reward()` is called. `each`: after each action. `end`: once, after the final answer.
            success_reward: An episode whose total reward is at least this counts as solved.
            version: Version that follows the class's name in the environment name of every trajectory.
        """
        self._loop = WorldLoop()
        self._env = self.played = self._loop.result(load_object(make)(**dict(settings or {})))
        label = type(self._env).__name__
        self.name = f"{label}-{version}" if version else label
        self._each, self._success_reward = ask_reward == "each", success_reward
        self._tools = _tools(self._env)
        self._schemas = tuple(map(schema_of, self._tools.values()))
        self._rows = {
            split: _read_rows(user_path(file, f"environment.rows.{split}"), split)
            for split, file in rows.items()
        }
        self._paid = 0.0

    def tasks(self, split: str) -> Sequence[Task]:
        """Return one task per row of the split."""
        check_known(split, self._rows, f"Unknown split {split!r}; environment.rows has no file for it")
        return self._rows[split]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Call the object's `reset` with the task's row, and return the prompt and the tools."""
        row = deepcopy(dict(task.data))
        said = self._loop.result(self._env.reset(**row))
        if not isinstance(said, str | None):
            raise EnvironmentFailure(
                f"reset of {self.name} returned {said!r:.60}, a {type(said).__name__}. Remedy: return a str or None."
            )
        self._paid = 0.0
        return Observation(_prompt_text(row.get("prompt", "")) + (said or ""), tools=self._schemas)

    def step(self, action: str) -> Observation:
        """Run the tool calls of an action; an action without calls is the final answer and ends the episode."""
        said = read_action(action)
        if said is None or not (said.calls or said.text.strip()):
            return Observation(_NO_ACTION, success=self._is_solved(), valid=False)
        results = tuple(map(self._call, said.calls))
        ended = not said.calls
        reward = self._pay(ended) if ended or self._each else 0.0
        valid = all(call.name in self._tools for call in said.calls)
        return Observation("", reward, ended, self._is_solved(ended), valid, results=results)

    def close(self) -> None:
        """End the event loop. The object itself is not closed, since TRL's interface has no `close`."""
        self._loop.close()

    def _call(self, call: ToolCall) -> str:
        """Return the result of a tool call, or its error, in TRL's wording."""
        if call.name not in self._tools:
            return str({"error": f"Tool {call.name} not found."})
        try:
            return str(self._loop.result(self._tools[call.name](**call.arguments)))
        except Exception as error:  # noqa: BLE001  a tool is user code, and its exception is its result
            return str({"error": str(error)})

    def _is_solved(self, ended: bool = False) -> bool:
        """Return whether the last value of `get_reward()` in this episode solves the task."""
        return (ended or self._each) and self._paid >= self._success_reward

    def _pay(self, ended: bool) -> float:
        """Return the increase of `get_reward()` since the last call; None in an unfinished episode counts as 0.

        Raises:
            EnvironmentFailure: If `get_reward()` is None at the end of the episode.
        """
        said = self._loop.result(self._env.get_reward())
        if said is None and not ended:
            return 0.0
        if said is None:
            raise EnvironmentFailure(
                f"get_reward() of {self.name} is None at the end of the episode, which has no score then. Remedy: "
                "return a float."
            )
        total = as_number(said, f"get_reward() of {self.name}")
        paid, self._paid = self._paid, total
        return total - paid


def _tools(env: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that TRL uses as tools, by name, in TRL's order.

    Raises:
        ConfigError: If the class has no tool, or lacks `reset` or `get_reward`.
    """
    label = type(env).__name__
    for method, why in _NEEDED.items():
        found = getattr(env, method, None)
        required(found if callable(found) else None, f"method {method}() of {label}", why, "define it")
    names = [name for name, _ in inspect.getmembers(type(env), inspect.isfunction) if name not in _NEEDED]
    tools = {name: getattr(env, name) for name in names if not name.startswith("_")}
    reader = "its public methods besides reset and get_reward are the tools"
    required(tools or None, f"a tool of {label}", reader, "define a method")
    return tools


def _read_rows(file: Path, split: str) -> list[Task]:
    """Return the rows of a file as tasks with the ids `split/number`."""
    return [Task(f"{split}/{number}", split=split, data=row) for number, _, row in numbered_rows(file)]


def _prompt_text(prompt: Any) -> str:
    """Return the text of a row's prompt.

    Raises:
        EnvironmentFailure: If the prompt is neither a text nor a list with one user message.
    """
    if isinstance(prompt, str):
        return prompt
    roles = [message.get("role") for message in prompt] if isinstance(prompt, list) else None
    if roles != ["user"]:
        raise EnvironmentFailure(
            f"prompt must be a text or one user message, got roles {roles}. Remedy: put the system text into "
            "protocol.system, and earlier turns into protocol.example."
        )
    return str(prompt[0].get("content") or "")
