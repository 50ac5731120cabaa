"""TRL's conversational rows, read as its trainers read them, and written so that they are read back alike.

What carries no loss stays in the prompt, here as in TRL; every assistant message after it is a turn. TRL's
`chat_template_kwargs` has no place in a trajectory and is left behind, as are the keys of an assistant
message other than role, content and tool_calls.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from perturn.data.content import flatten
from perturn.errors import DataError, did_you_mean
from perturn.io.plain import fault, mismatch
from perturn.io.reading import parse_json
from perturn.types import Action, Message, PreferencePair, Task, Trajectory, Turn

_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "label", "conversations")
_SYSTEM = ("developer", "system")
_ROLES = ("assistant", "developer", "system", "tool", "user")
_REASONING = ("reasoning", "reasoning_content", "thinking")
_FORMS = "messages; prompt and completion; prompt, chosen and rejected; chosen and rejected (implicit prompt)"


def from_trl(
    row: Mapping[str, Any], *, task_id: str, index: int | None = None, counts: Counter[str] | None = None
) -> Trajectory | PreferencePair:
    """A TRL conversational row as a trajectory, or as a preference pair if it has `chosen` and `rejected`.

    Into `Trajectory.prompt`, which never carries loss, go leading system messages and, of an explicit
    `prompt`, every message up to its last assistant message. Each later assistant message is an action, and
    the messages before it, as they are, its observation. With an implicit prompt all of a conversation is in
    both sides, so turns they share carry loss too.

    Keys that hold None, as Arrow fills in what a row lacks, are taken as absent at any depth; so is a null
    that was meant as an argument of a tool call. A row with more than one form is read as a pair first, then
    as prompt and completion. A text `prompt` beside conversational sides is ignored, as TRL ignores it.

    Args:
        row: The row; numpy arrays count as lists. Other columns are ignored.
        task_id: Id of the task; a pair's sides are samples 0 and 1 of it.
        index: Number of the row, for error messages.
        counts: Grows by `trailing_messages`: how many came after the last assistant message and were dropped.
    """
    where = "row" if index is None else f"row {index}"
    if not isinstance(row, Mapping):
        _fail(where, "a mapping of columns", row)
    columns = {name: _column(row[name], f"{where}: {name}") for name in _COLUMNS if row.get(name) is not None}
    prompt, sides = _form(columns, where)
    tools = _tools(columns.get("tools", []), f"{where}: tools")
    trajectories = []
    trailing = 0
    for sample, side in enumerate(sides):
        messages = _conversation(columns[side], f"{where}: {side}")
        if prompt and prompt[0]["role"] != "assistant" and messages[: len(prompt)] == prompt:
            raise DataError(
                f"{where}: {side}: repeats the prompt. Drop the column prompt, or cut {side} after it."
            )
        head, turns, dropped = _split(prompt, messages)
        if not turns:
            raise DataError(f"{where}: {side}: expected an assistant message, got none. Drop the row.")
        trajectories.append(Trajectory(Task(task_id), turns, prompt=head, tools=tools, sample=sample))
        trailing += dropped
    if len(sides) == 2 and trajectories[0].messages == trajectories[1].messages:
        raise DataError(f"{where}: rejected: expected to differ from chosen, got the same. Drop the row.")
    if counts is not None:
        counts["trailing_messages"] += trailing
    return trajectories[0] if len(sides) == 1 else PreferencePair(*trajectories)


def to_trl(row: Trajectory | PreferencePair) -> dict[str, Any]:
    """A trajectory as `prompt` and `completion`, or a pair as `prompt`, `chosen` and `rejected`, with `tools` if any.

    The prompt holds what never carries loss and the first observation; the rest is the completion. `from_trl` reads the
    same turns back; rewards, token ids and what else a trajectory records have no place in a row of TRL's.

    Raises:
        DataError: If the two sides of a pair do not begin with the same prompt and observation, or the policy saw a
            shortened history.
    """
    if isinstance(row, Trajectory):
        prompt, completion = _completion(row)
        return {"prompt": prompt, "completion": completion, **_with_tools(row)}
    (prompt, chosen), (other, rejected) = _completion(row.chosen), _completion(row.rejected)
    if prompt != other:
        raise DataError(
            f"task {row.chosen.task.id!r}: chosen and rejected begin with different prompts, which no row of TRL's "
            "can say. Make the pair of episodes of one protocol."
        )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **_with_tools(row.chosen)}


def _completion(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """The messages up to the first action, and those from it on."""
    if not trajectory.is_one_sequence:
        raise DataError(
            f"task {trajectory.task.id!r}: its {len(trajectory.turns)} turns are not one conversation, as a row of "
            f"TRL's is: the policy saw only the last {trajectory.history} at each. Play the tasks again with "
            "protocol.history=full to export them; perturn trains on them as they are."
        )
    first = len(trajectory.prompt) + (len(trajectory.turns[0].observation) if trajectory.turns else 0)
    return trajectory.messages[:first], trajectory.messages[first:]


def _with_tools(trajectory: Trajectory) -> dict[str, Any]:
    return {"tools": json.dumps([dict(tool) for tool in trajectory.tools])} if trajectory.tools else {}


def _form(columns: dict[str, Any], where: str) -> tuple[list[Message], tuple[str, ...]]:
    """The messages of an explicit prompt, and the columns that hold the sides."""
    prompt = columns.get("prompt", [])
    if "chosen" in columns and "rejected" in columns:
        if isinstance(prompt, str) and isinstance(columns["chosen"], list):
            prompt = []
        return _conversation(prompt, f"{where}: prompt"), ("chosen", "rejected")
    if "prompt" in columns and "completion" in columns:
        if isinstance(columns.get("label"), bool):
            raise DataError(
                f"{where}: label: unpaired preferences are read by the loss kto alone. Choose it, or make pairs of "
                "chosen and rejected."
            )
        return _conversation(prompt, f"{where}: prompt"), ("completion",)
    if "messages" in columns:
        return [], ("messages",)
    got = ", ".join(columns) or "none of these columns"
    remedy = " Convert the row with trl.maybe_convert_to_chatml." if "conversations" in columns else ""
    raise DataError(f"{where}: expected one of the forms {_FORMS}; got {got}.{remedy}")


def _conversation(value: Any, where: str) -> list[Message]:
    if isinstance(value, str):
        raise DataError(
            f"{where}: expected messages, got text, which is TRL's standard format. "
            'Wrap it: [{"role": "user", "content": ...}], or role assistant for what carries loss.'
        )
    if not isinstance(value, list):
        _fail(where, "a list of messages", value)
    return [_message(each, f"{where}[{index}]") for index, each in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        _fail(where, "a message object", message)
    if "role" not in message:
        remedy = " Convert the row with trl.maybe_convert_to_chatml." if "from" in message else ""
        raise DataError(f"{where}: expected a message with a role, got keys {sorted(message)}.{remedy}")
    role = message["role"]
    if role not in _ROLES:
        raise DataError(f"{where}.role: unknown role {role!r:.200}.{did_you_mean(str(role), _ROLES)}")
    content = flatten(message.get("content", ""), f"{where}.content")
    if not isinstance(content, str):
        _fail(f"{where}.content", "text", content)
    return _assistant(message, content, where) if role == "assistant" else {**message, "content": content}


def _assistant(message: Message, text: str, where: str) -> Message:
    """An assistant message as `Action.message` writes it."""
    for key in _REASONING:
        if message.get(key):
            raise DataError(
                f"{where}.{key}: reasoning has no place in an action. Move it into content, or drop it."
            )
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        _fail(f"{where}.tool_calls", "a list of objects", calls)
    for index, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _fail(f"{where}.tool_calls[{index}]", "a call with the name of its function", call)
    if not text and not calls:
        raise DataError(
            f"{where}: expected text or tool calls in an assistant message, got neither. Drop the row."
        )
    return Action(text, tool_calls=tuple(calls)).message()


def _split(prompt: list[Message], side: list[Message]) -> tuple[tuple[Message, ...], tuple[Turn, ...], int]:
    """The messages without loss, the turns, and how many messages follow the last turn."""
    messages = prompt + side
    system = next(
        (index for index, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages)
    )
    answered = max((index + 1 for index, each in enumerate(prompt) if each["role"] == "assistant"), default=0)
    start = max(system, answered)
    turns: list[Turn] = []
    observation: list[Message] = []
    for message in messages[start:]:
        if message["role"] == "assistant":
            calls = tuple(message.get("tool_calls", ()))
            turns.append(Turn(tuple(observation), Action(message["content"], tool_calls=calls)))
            observation = []
        else:
            observation.append(message)
    return tuple(messages[:start]), tuple(turns), len(observation)


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        value = _column(
            parse_json(value, where, DataError, "Give a list of schemas, or its JSON text."), where
        )
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        _fail(where, "a list of schemas or its JSON text", value)
    return tuple(value)


def _column(value: Any, where: str) -> Any:
    """A column as plain data."""
    try:
        plain = _plain(value)
    except RecursionError:
        raise DataError(f"{where}: too many levels of lists and objects. Drop the row.") from None
    if found := fault(plain, where):
        raise DataError(f"{found}. Correct it, or drop the row.")
    return plain


def _plain(value: Any) -> Any:
    """Lists, dicts and scalars of Python, without the keys that hold None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _fail(where: str, expected: str, value: object) -> NoReturn:
    raise DataError(f"{where}: {mismatch(expected, value)}. Correct the value.")
