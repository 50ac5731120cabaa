"""Convert TRL's conversational rows to trajectories and pairs as its trainers read them, and convert them back.

Messages without loss stay in the prompt, as in TRL, and every assistant message after the prompt is a turn.
`row_shapes` first converts rows of other trainers to TRL's columns, and `chat_messages` reads the messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from perturn.data.origins import without_ids
from perturn.errors import DataError
from perturn.formats.chat_messages import Read, read_messages
from perturn.formats.column_names import LABELS, as_label, columns_of, plain_column
from perturn.formats.row_shapes import SYSTEM
from perturn.formats.unreadable_files import keys_of, what_wrapper
from perturn.io.plain_data import mismatch
from perturn.io.read_input import parse_json
from perturn.types import Action, Message, PreferencePair, Task, Trajectory, Turn

TRAILING = "trailing_messages"
"""Key of `counts` for messages after the last answer."""
ONLY_KTO = (
    "label: unpaired preferences are read by the loss kto alone. Choose it, or make pairs of chosen and "
    "rejected."
)
"""Error for a labelled row, if the loss does not read labels."""
_FORMS = (
    "messages (or conversations); prompt and completion; prompt, chosen and rejected; chosen and rejected; text; "
    "instruction and output"
)


def from_trl(
    row: Mapping[str, Any],
    *,
    task_id: str,
    index: int | None = None,
    counts: Counter[str] | None = None,
    shapes: Counter[str] | None = None,
    filled: bool = False,
) -> Trajectory | PreferencePair:
    """Return a conversational row as a trajectory, or as a preference pair if it has `chosen` and `rejected`.

    `Trajectory.prompt` never carries loss. It holds the leading system messages, and the messages of the row's prompt
    up to its last assistant message. Each later assistant message is an action, and the messages before it are its
    observation. In a pair without a prompt, the first messages that both sides share are the prompt. Ids may differ.

    An assistant message is a turn without loss if it is empty or marked (`weight: 0`, `train: false`, `loss: false`,
    `loss_mask: 0`). A row that fits several formats is read as a pair if possible, and else as prompt and completion. A
    text `prompt` next to conversational sides is ignored, as TRL ignores it.

    A key of a message with the value None counts as missing. A null in the arguments of a tool call, or under `default`
    in a schema, is kept. Arrow fills in None for missing keys, so all nulls are dropped from a row that comes from
    Arrow.

    Args:
        row: The row. Numpy arrays are read as lists.
        task_id: Id of the task. The sides of a pair are samples 0 and 1 of the task.
        index: Number of the row, for error messages.
        counts: Counter of ignored keys of the row and its messages. Messages dropped after the last assistant message
            are counted under `trailing_messages`.
        shapes: Counter of recognised formats.
        filled: Whether the row comes from Arrow. This is also assumed of a row whose messages all have the same keys,
            some with None.
    """
    where = "row" if index is None else f"row {index}"
    if not isinstance(row, Mapping):
        _fail(where, "a mapping of columns", row)
    unread: set[str] = set()
    columns, shape = columns_of(row, where, filled, unread)
    sides = _form(columns, row, where, unread)
    known: dict[str, Any] = {
        "tools": _tools(columns.get("tools", []), f"{where}: tools"),
        "template_kwargs": _kwargs(columns.get("chat_template_kwargs", {}), f"{where}: chat_template_kwargs"),
    }
    trajectories = []
    trailing = 0
    for sample, (side, (prompt, messages)) in enumerate(sides.items()):
        head, turns, dropped = _split(prompt, messages)
        _check_turns(turns, f"{where}: {side}")
        trajectories.append(Trajectory(Task(task_id), turns, prompt=head, sample=sample, **known))
        trailing += dropped
    if len(sides) == 2 and _as_read(trajectories[0].messages) == _as_read(trajectories[1].messages):
        raise DataError(
            f"{where}: rejected: expected another text than in chosen, got the same text. Drop the row."
        )
    if counts is not None:
        counts.update(unread)
        counts[TRAILING] += trailing
    if shapes is not None:
        shapes[shape] += 1
    return trajectories[0] if len(sides) == 1 else PreferencePair(*trajectories)


def label_of(row: Mapping[str, Any]) -> bool | None:
    """Return whether a row is desirable, by TRL's `label` or LLaMA-Factory's `kto_tag`; None if it has neither."""
    found: dict[str, Any] = {name: row.get(name) for name in LABELS}
    plain = {name: each.tolist() if hasattr(each, "tolist") else each for name, each in found.items()}
    return next((label for name in plain if (label := as_label(name, plain[name])) is not None), None)


def describe_unread(counts: Counter[str]) -> str:
    """Return a description of the keys and messages that were ignored; empty if none were."""
    keys = [f"{key} ({rows} rows)" for key, rows in sorted(counts.items()) if key != TRAILING and rows]
    said = [f"keys that nothing reads: {', '.join(keys)}"] if keys else []
    if counts[TRAILING]:
        said.append(f"messages after the last answer, which were dropped: {counts[TRAILING]}")
    return "; ".join(said)


def to_trl(row: Trajectory | PreferencePair) -> dict[str, Any]:
    """Return a trajectory as `prompt` and `completion`, or a pair as `prompt`, `chosen` and `rejected`; add `tools`.

    The prompt holds the messages without loss and the first observation. All later messages are the completion. A turn
    without loss is marked `weight: 0`, as in OpenAI's format, and an answer cut at a token limit `ended: false`.
    `from_trl` reads the same turns back, but TRL's rows cannot hold rewards, token ids and other parts of a trajectory.

    Raises:
        DataError: If the sides of a pair have different tools, or begin with different prompts or observations; or if
            the policy saw a shortened history.
    """
    if isinstance(row, Trajectory):
        prompt, completion = _completion(row)
        return {"prompt": prompt, "completion": completion, **_beside(row)}
    (prompt, chosen), (other, rejected) = _completion(row.chosen), _completion(row.rejected)
    compared = (
        ("begin with different prompts", _as_read(prompt), _as_read(other), "one protocol"),
        ("have different tools", row.chosen.tools, row.rejected.tools, "equal tools"),
        (
            "have different chat_template_kwargs",
            row.chosen.template_kwargs,
            row.rejected.template_kwargs,
            "equal variables",
        ),
    )
    for what, one, two, same in compared:
        if one != two:
            raise DataError(
                f"task {row.chosen.task.id!r}: chosen and rejected {what}, which no row of TRL's can say. Make the "
                f"pair of episodes with {same}."
            )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **_beside(row.chosen)}


def _completion(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """Return the messages before the first action, and the messages from the first action on."""
    if not trajectory.is_one_sequence:
        raise DataError(
            f"task {trajectory.task.id!r}: its {len(trajectory.turns)} turns are not one conversation, so they do not "
            f"fit a row of TRL: {_why_several(trajectory)}; perturn can train on them."
        )
    messages = list(trajectory.prompt)
    for turn in trajectory.turns:
        mark = {} if turn.trained else {"weight": 0}
        cut = {} if turn.action.ended else {"ended": False}
        messages += [*turn.observation, turn.action.message() | mark | cut]
    first = len(trajectory.prompt) + (len(trajectory.turns[0].observation) if trajectory.turns else 0)
    return messages[:first], messages[first:]


def _why_several(trajectory: Trajectory) -> str:
    """Explain why the turns of an episode are not one conversation."""
    if trajectory.history is None:
        return (
            "the agent began further conversations or took turns again. Leave the episode out of the export"
        )
    shown = f"the policy saw only the last {trajectory.history} at each"
    return f"{shown}. Play the tasks again with protocol.history=full to export them"


def _beside(trajectory: Trajectory) -> dict[str, Any]:
    """Return the columns other than the messages."""
    tools = [dict(tool) for tool in trajectory.tools]
    found: dict[str, Any] = {"tools": json.dumps(tools)} if tools else {}
    variables = dict(trajectory.template_kwargs)
    return found | ({"chat_template_kwargs": variables} if variables else {})


def _form(
    columns: dict[str, Any], row: Mapping[str, Any], where: str, unread: set[str]
) -> dict[str, tuple[list[Read], list[Read]]]:
    """Return the messages of the prompt and of the answer for each side, by the format of the row."""

    def read(column: str) -> list[Read]:
        return read_messages(columns[column], f"{where}: {column}", unread)

    if "chosen" in columns and "rejected" in columns:
        is_ignored = isinstance(columns.get("prompt"), str) and isinstance(columns["chosen"], list)
        if columns.get("prompt") and not is_ignored:
            return _prompted(read("prompt"), {name: read(name) for name in ("chosen", "rejected")}, where)
        chosen, rejected = read("chosen"), read("rejected")
        shared = _shared(chosen, rejected)
        sides = {"chosen": chosen, "rejected": rejected}
        return {name: (side[:shared], side[shared:]) for name, side in sides.items()}
    if label_of(columns) is not None and {"completion", "messages"} & columns.keys():
        raise DataError(f"{where}: {ONLY_KTO}")
    if "prompt" in columns and "completion" in columns:
        return _prompted(read("prompt"), {"completion": read("completion")}, where)
    if "messages" in columns:
        return {"messages": ([], read("messages"))}
    raise DataError(f"{where}: expected one of the forms {_FORMS}; got {keys_of(row)}.{_hint(columns, row)}")


def _hint(columns: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the remedy for a row of unknown format."""
    if "completions" in row and "labels" in row:
        return (
            " Stepwise supervision has no loss here. Give a WeightedTrajectory with a weight for each turn."
        )
    if "prompt" in columns and not columns.keys() & {"chosen", "rejected"}:
        return (
            " A prompt alone has no answer to learn from. Tasks that a policy plays come from an environment."
        )
    if columns.keys() & {"prompt", "completion", "chosen", "rejected"}:
        return " Add the missing columns of one form."
    return f" {wrapped[0].upper()}{wrapped[1:]}" if (wrapped := what_wrapper(row)) else " Rename the columns."


def _prompted(
    prompt: list[Read], sides: dict[str, list[Read]], where: str
) -> dict[str, tuple[list[Read], list[Read]]]:
    """Return each side with the prompt. Raise a DataError if a side repeats it: a model would read it twice."""
    asked = _as_read(_messages(prompt))
    begins_with_question = bool(prompt) and prompt[0].message["role"] != "assistant"
    for name, side in sides.items():
        if begins_with_question and _as_read(_messages(side[: len(prompt)])) == asked:
            raise DataError(
                f"{where}: {name}: repeats the prompt. Drop the column prompt, or cut {name} after it."
            )
    return {name: (prompt, side) for name, side in sides.items()}


def _shared(chosen: list[Read], rejected: list[Read]) -> int:
    """Return the number of first messages that both sides share and that come before their last answers."""
    last = [
        max((index for index, each in enumerate(side) if each.message["role"] == "assistant"), default=0)
        for side in (chosen, rejected)
    ]
    pairs = enumerate(zip(_as_read(_messages(chosen)), _as_read(_messages(rejected)), strict=False))
    same = next((at for at, (one, other) in pairs if one != other), len(chosen))
    return min(same, *last)


def _split(prompt: list[Read], side: list[Read]) -> tuple[tuple[Message, ...], tuple[Turn, ...], int]:
    """Return the messages without loss, the turns, and the number of messages after the last turn."""
    reads = prompt + side
    messages = _messages(reads)
    system = next((at for at, each in enumerate(messages) if each["role"] not in SYSTEM), len(messages))
    answered = [at + 1 for at, each in enumerate(prompt) if each.message["role"] == "assistant"]
    start = max([system, *answered])
    turns: list[Turn] = []
    observation: list[Message] = []
    for one in reads[start:]:
        message = one.message
        if message["role"] == "assistant":
            thought = message.get("reasoning_content", "")
            action = Action(
                message["content"],
                tool_calls=tuple(message.get("tool_calls", ())),
                reasoning=thought,
                ended=one.ended,
            )
            turns.append(Turn(tuple(observation), action, trained=one.trained))
            observation = []
        else:
            observation.append(message)
    return tuple(messages[:start]), tuple(turns), len(observation)


def _messages(reads: Sequence[Read]) -> list[Message]:
    return [one.message for one in reads]


def _as_read(messages: Iterable[Message]) -> list[tuple[object, ...]]:
    """Return what a policy reads of each message, without ids of calls, dates and other keys."""
    return [
        (
            *(message.get(key) or "" for key in ("role", "name", "content", "reasoning_content")),
            without_ids(message.get("tool_calls") or ()),
        )
        for message in messages
    ]


def _check_turns(turns: tuple[Turn, ...], where: str) -> None:
    """Raise a DataError if a side has no turn that carries loss."""
    if not turns:
        raise DataError(f"{where}: expected an assistant message, got none. Drop the row.")
    if not any(turn.carries_loss for turn in turns):
        all_empty = all(turn.trained and turn.action.ended for turn in turns)
        why = "empty" if all_empty else "marked as without loss, cut inside a thought or a call, or empty"
        raise DataError(
            f"{where}: expected an assistant message that carries loss, but all of them are {why}. Drop the row."
        )


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    value = _parsed(value, where, "Give a list of schemas, or its JSON text.")
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        _fail(where, "a list of schemas or its JSON text", value)
    return tuple(_wrapped(_without_nulls(tool)) for tool in value)


def _wrapped(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in the format of chat templates.

    Rows of LLaMA-Factory hold only the schema of the function. OpenAI's Responses API adds `type` to its keys.
    """
    is_function = schema.get("type", "function") == "function" and "function" not in schema
    if not is_function or not isinstance(schema.get("name"), str):
        return schema
    return {"type": "function", "function": {key: item for key, item in schema.items() if key != "type"}}


def _without_nulls(schema: Any) -> Any:
    """Return a schema without the keys whose value is None, except `default` and `const`, where None has a meaning."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    literal = {"default", "const", "enum", "examples"}
    return {
        key: value if key in literal and not isinstance(value, dict) else _without_nulls(value)
        for key, value in schema.items()
        if value is not None or key in ("default", "const")
    }


_RESERVED = {
    *(
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
    ),
    *(
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
    ),
    *("tokenizer_kwargs", "tools", "truncation"),
}
"""Arguments of `apply_chat_template` that are no variables of the template."""


def _kwargs(value: Any, where: str) -> Mapping[str, Any]:
    """Return the variables for the chat template in a column."""
    value = _parsed(value, where, "Give an object of variables, or its JSON text.")
    value = {} if value is None else value
    if not isinstance(value, dict):
        _fail(where, "an object of variables for the chat template", value)
    given = {key: item for key, item in value.items() if item is not None}
    if reserved := sorted(_RESERVED & given.keys()):
        raise DataError(
            f"{where}.{reserved[0]}: expected variables of the chat template, got an argument of the call that renders "
            "it. Leave it out."
        )
    return given


def _parsed(value: Any, where: str, remedy: str) -> Any:
    """Parse a column that may be JSON text; return None if the text is empty."""
    if not isinstance(value, str):
        return value
    return plain_column(parse_json(value, where, DataError, remedy), where) if value.strip() else None


def _fail(where: str, expected: str, value: object) -> NoReturn:
    raise DataError(f"{where}: {mismatch(expected, value)}. Correct the value.")
