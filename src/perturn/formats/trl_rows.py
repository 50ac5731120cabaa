"""TRL's conversational rows, read as its trainers read them, and written so that reading them gives the same rows.

What carries no loss stays in the prompt, here as in TRL; every assistant message after it is a turn. Rows in the forms
of other trainers are first brought into TRL's (`forms.py`), and their messages are read by `messages.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from perturn.errors import DataError
from perturn.formats.chat_messages import Read, read_messages
from perturn.formats.column_names import LABELS, columns_of, plain_column
from perturn.formats.unreadable_files import keys_of, what_wrapper
from perturn.io.plain_data import mismatch
from perturn.io.read_input import parse_json
from perturn.types import Action, Message, PreferencePair, Task, Trajectory, Turn

TRAILING = "trailing_messages"
"""Under which messages after the last answer are counted."""
_SYSTEM = ("developer", "system")
ONLY_KTO = (
    "label: unpaired preferences are read by the loss kto alone. Choose it, or make pairs of chosen and "
    "rejected."
)
"""Why a row with a label is refused where no loss reads it."""
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

    Into `Trajectory.prompt`, which never carries loss, go leading system messages and every message of the prompt up to
    its last assistant message. Each later assistant message is an action, and the unchanged messages before it are its
    observation. Of `chosen` and `rejected` alone, the messages that both begin with are the prompt.

    An assistant message that is empty, or marked so (`weight: 0`, `train: false`, `loss: false`, `loss_mask: 0`), is a
    turn without loss. A row with more than one form is read as a pair first, then as prompt and completion. A text
    `prompt` next to conversational sides is ignored, as TRL ignores it.

    Keys of a message that hold None are absent. Nulls in the arguments of a call and in `default` of a schema are kept.
    They are dropped if the row has been through Arrow, which fills in None for each key that a row lacks.

    Args:
        row: The row; numpy arrays count as lists.
        task_id: Id of the task; a pair's sides are samples 0 and 1 of it.
        index: Number of the row, for error messages.
        counts: Grows by `trailing_messages` (how many came after the last assistant message and were dropped), and by
            one for each key of the row or its messages that nothing reads.
        shapes: Grows by one for the form that the row was recognised as, in words.
        filled: Whether the row is of a data set that Arrow holds; a row whose messages all have the same keys, some
            with None, is taken for such a row anyway.
    """
    where = "row" if index is None else f"row {index}"
    if not isinstance(row, Mapping):
        _fail(where, "a mapping of columns", row)
    unread: set[str] = set()
    columns, shape = columns_of(row, where, filled, unread)
    prompt, sides = _form(columns, row, where, unread)
    known: dict[str, Any] = {
        "tools": _tools(columns.get("tools", []), f"{where}: tools"),
        "template_kwargs": _kwargs(columns.get("chat_template_kwargs", {}), f"{where}: chat_template_kwargs"),
    }
    trajectories = []
    trailing = 0
    for sample, (side, messages) in enumerate(sides.items()):
        head, turns, dropped = _split(prompt, messages)
        _check_turns(turns, f"{where}: {side}")
        trajectories.append(Trajectory(Task(task_id), turns, prompt=head, sample=sample, **known))
        trailing += dropped
    if len(sides) == 2 and trajectories[0].messages == trajectories[1].messages:
        raise DataError(f"{where}: rejected: expected to differ from chosen, got the same. Drop the row.")
    if counts is not None:
        counts.update(unread)
        counts[TRAILING] += trailing
    if shapes is not None:
        shapes[shape] += 1
    return trajectories[0] if len(sides) == 1 else PreferencePair(*trajectories)


def label_of(row: Mapping[str, Any]) -> bool | None:
    """Return whether a row is desirable, by TRL's `label` or LLaMA-Factory's `kto_tag`; None if it has neither."""
    found: list[Any] = [row.get(name) for name in LABELS]
    plain = [each.tolist() if hasattr(each, "tolist") else each for each in found]
    return next((each for each in plain if isinstance(each, bool)), None)


def told_unread(counts: Counter[str]) -> str:
    """Return the keys and messages that were left out of rows, in words; empty if there are none."""
    keys = [f"{key} ({rows} rows)" for key, rows in sorted(counts.items()) if key != TRAILING and rows]
    said = [f"keys that nothing reads: {', '.join(keys)}"] if keys else []
    if counts[TRAILING]:
        said.append(f"messages after the last answer, which were dropped: {counts[TRAILING]}")
    return "; ".join(said)


def to_trl(row: Trajectory | PreferencePair) -> dict[str, Any]:
    """Return a trajectory as `prompt` and `completion`, or a pair as `prompt`, `chosen` and `rejected`; add `tools`.

    The prompt holds the messages without loss and the first observation; the rest is the completion. A turn that is not
    trained is marked `weight: 0`, as OpenAI marks it. `from_trl` reads the same turns back; TRL's rows have no place
    for rewards, token ids and the rest of a trajectory.

    Raises:
        DataError: If the two sides of a pair do not begin with the same prompt and observation, or the policy saw a
            shortened history.
    """
    if isinstance(row, Trajectory):
        prompt, completion = _completion(row)
        return {"prompt": prompt, "completion": completion, **_beside(row)}
    (prompt, chosen), (other, rejected) = _completion(row.chosen), _completion(row.rejected)
    if prompt != other or row.chosen.template_kwargs != row.rejected.template_kwargs:
        what = "begin with different prompts" if prompt != other else "have different chat_template_kwargs"
        raise DataError(
            f"task {row.chosen.task.id!r}: chosen and rejected {what}, which no row of TRL's can say. Make the pair of "
            "episodes of one protocol."
        )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **_beside(row.chosen)}


def _completion(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """Return the messages up to the first action, and those from it on."""
    if not trajectory.is_one_sequence:
        raise DataError(
            f"task {trajectory.task.id!r}: its {len(trajectory.turns)} turns are not one conversation, so they do not "
            f"fit a row of TRL: {_why_several(trajectory)}; perturn can train on them."
        )
    messages = list(trajectory.prompt)
    for turn in trajectory.turns:
        mark = {} if turn.trained else {"weight": 0}
        messages += [*turn.observation, turn.action.message() | mark]
    first = len(trajectory.prompt) + (len(trajectory.turns[0].observation) if trajectory.turns else 0)
    return messages[:first], messages[first:]


def _why_several(trajectory: Trajectory) -> str:
    """Say why the turns of an episode are not one conversation."""
    if trajectory.history is None:
        return (
            "the agent began further conversations or took turns again. Leave the episode out of the export"
        )
    shown = f"the policy saw only the last {trajectory.history} at each"
    return f"{shown}. Play the tasks again with protocol.history=full to export them"


def _beside(trajectory: Trajectory) -> dict[str, Any]:
    """Return the columns besides the messages."""
    tools = [dict(tool) for tool in trajectory.tools]
    found: dict[str, Any] = {"tools": json.dumps(tools)} if tools else {}
    variables = dict(trajectory.template_kwargs)
    return found | ({"chat_template_kwargs": variables} if variables else {})


def _form(
    columns: dict[str, Any], row: Mapping[str, Any], where: str, unread: set[str]
) -> tuple[list[Read], dict[str, list[Read]]]:
    """Return the messages of the prompt, and the messages of each side."""

    def read(column: str) -> list[Read]:
        return read_messages(columns[column], f"{where}: {column}", unread)

    if "chosen" in columns and "rejected" in columns:
        is_ignored = isinstance(columns.get("prompt"), str) and isinstance(columns["chosen"], list)
        if columns.get("prompt") and not is_ignored:
            prompt, sides = read("prompt"), {"chosen": read("chosen"), "rejected": read("rejected")}
            _refuse_repeated(prompt, sides, where)
            return prompt, sides
        chosen, rejected = read("chosen"), read("rejected")
        shared = _shared(chosen, rejected)
        return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}
    if label_of(columns) is not None and {"completion", "messages"} & columns.keys():
        raise DataError(f"{where}: {ONLY_KTO}")
    if "prompt" in columns and "completion" in columns:
        prompt, sides = read("prompt"), {"completion": read("completion")}
        _refuse_repeated(prompt, sides, where)
        return prompt, sides
    if "messages" in columns:
        return [], {"messages": read("messages")}
    raise DataError(f"{where}: expected one of the forms {_FORMS}; got {keys_of(row)}.{_hint(columns, row)}")


def _hint(columns: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the remedy for a row of unknown form."""
    if "completions" in row and "labels" in row:
        return (
            " Stepwise supervision has no loss here. Give a WeightedTrajectory with a weight for each turn."
        )
    if "prompt" in columns and not columns.keys() & {"chosen", "rejected"}:
        return (
            " A prompt alone has no answer to learn from. Tasks that a policy plays come from an environment."
        )
    if columns.keys() & {"prompt", "completion", "chosen", "rejected"}:
        return " Add the columns that are missing of a form."
    return f" {wrapped[0].upper()}{wrapped[1:]}" if (wrapped := what_wrapper(row)) else " Rename the columns."


def _refuse_repeated(prompt: list[Read], sides: dict[str, list[Read]], where: str) -> None:
    """Reject a side that begins with the whole prompt, which a model would then read twice."""
    if not prompt or prompt[0].message["role"] == "assistant":
        return
    for name, side in sides.items():
        if _messages(side[: len(prompt)]) == _messages(prompt):
            raise DataError(
                f"{where}: {name}: repeats the prompt. Drop the column prompt, or cut {name} after it."
            )


def _shared(chosen: list[Read], rejected: list[Read]) -> int:
    """Return how many messages both sides share as their prompt, up to the last answer of either."""
    last = [
        max((index for index, each in enumerate(side) if each.message["role"] == "assistant"), default=0)
        for side in (chosen, rejected)
    ]
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((at for at, (one, other) in pairs if one.message != other.message), len(chosen))
    return min(same, *last)


def _split(prompt: list[Read], side: list[Read]) -> tuple[tuple[Message, ...], tuple[Turn, ...], int]:
    """Return the messages without loss, the turns, and how many messages follow the last turn."""
    reads = prompt + side
    messages = _messages(reads)
    system = next((at for at, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
    answered = [at + 1 for at, each in enumerate(prompt) if each.message["role"] == "assistant"]
    start = max([system, *answered])
    turns: list[Turn] = []
    observation: list[Message] = []
    for one in reads[start:]:
        message = one.message
        if message["role"] == "assistant":
            thought = message.get("reasoning_content", "")
            action = Action(
                message["content"], tool_calls=tuple(message.get("tool_calls", ())), reasoning=thought
            )
            turns.append(Turn(tuple(observation), action, trained=one.trained))
            observation = []
        else:
            observation.append(message)
    return tuple(messages[:start]), tuple(turns), len(observation)


def _messages(reads: Sequence[Read]) -> list[Message]:
    return [one.message for one in reads]


def _check_turns(turns: tuple[Turn, ...], where: str) -> None:
    """Reject a side that nothing can be learned from."""
    if not turns:
        raise DataError(f"{where}: expected an assistant message, got none. Drop the row.")
    if not any(turn.carries_loss for turn in turns):
        all_empty = all(turn.trained for turn in turns)
        why = "all of them are empty" if all_empty else "all of them are marked as without loss, or empty"
        raise DataError(f"{where}: expected an assistant message that carries loss, but {why}. Drop the row.")


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    value = _parsed(value, where, "Give a list of schemas, or its JSON text.")
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        _fail(where, "a list of schemas or its JSON text", value)
    return tuple(_wrapped(_without_nulls(tool)) for tool in value)


def _wrapped(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in the form of chat templates; rows of LLaMA-Factory have the schema of the function alone."""
    is_bare = isinstance(schema.get("name"), str) and not {"function", "type"} & schema.keys()
    return {"type": "function", "function": schema} if is_bare else schema


def _without_nulls(schema: Any) -> Any:
    """Return a schema without the keys that hold None, which means something under `default` and `const` alone."""
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
"""Arguments of `apply_chat_template` that are not the template's variables."""


def _kwargs(value: Any, where: str) -> Mapping[str, Any]:
    """Return variables for the chat template."""
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
    """Return a column that may be given as JSON text; None if it is empty."""
    if not isinstance(value, str):
        return value
    return plain_column(parse_json(value, where, DataError, remedy), where) if value.strip() else None


def _fail(where: str, expected: str, value: object) -> NoReturn:
    raise DataError(f"{where}: {mismatch(expected, value)}. Correct the value.")
