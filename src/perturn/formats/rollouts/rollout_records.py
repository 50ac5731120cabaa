"""Read the common parts of rollout records: conversations, token ids with a mask, and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from perturn.data.records import LARGEST
from perturn.errors import DataError
from perturn.formats.chat_messages import CALL_ROLES, with_role
from perturn.formats.json_stream import Record
from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Reader, Score, Step, score_of
from perturn.formats.logs.log_values import at_path, bad, mapping, text_id, unpacked
from perturn.formats.logs.provider_messages import answer_of, messages_of, parsed
from perturn.formats.rollouts.chat_markup import conversation_of
from perturn.types import Action

REWARD = "reward"
"""Name of a rollout's score, in formats with a single reward."""


def reader(rollouts: Callable[[Mapping[str, Any], str, Fields], Iterator[Entry]]) -> Reader:
    """Return the reader of a format, given a function that yields the rollouts of one record.

    The reader yields a `LostEntry` with the reason for a record that cannot be read.
    """

    def read(records: Iterator[Record], fields: Fields) -> Iterator[Entry]:
        for record in records:
            if isinstance(record.value, DataError):
                yield LostEntry(record.where, "broken", str(record.value))
                continue
            try:
                yield from list(rollouts(record.value, record.where, fields))
            except DataError as error:
                yield LostEntry(record.where, "unsupported", str(error))

    return read


def scores_of(record: Mapping[str, Any], fields: Fields, reward: Any) -> tuple[Score, ...]:
    """Return the score of a rollout, from the user's field or else its reward; empty if it has none."""
    name = REWARD if fields.score is None else fields.score
    held = reward if name == REWARD else at_path(record, name)
    return () if held in (None, "") else (score_of(name, held),)


def task_of(record: Mapping[str, Any], fields: Fields, usual: Any) -> str | None:
    """Return the task of a rollout, from the field that the user names or else the given value."""
    return text_id(usual if fields.task is None else at_path(record, fields.task))


def with_calls(message: Any, where: str) -> Any:
    """Return a message with its role and its tool calls in the format of chat completions.

    The calls may be flat or JSON text.
    """
    if not isinstance(message, Mapping):
        return message
    message = with_role(message)
    calls = unpacked(message.get("tool_calls"), where)
    if not isinstance(calls, list) or not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    found = [mapping(call) for call in calls]
    if not all(found):
        raise bad(f"{where}.tool_calls", "a list of calls", calls)
    shaped = [
        call
        if isinstance(call.get("function"), Mapping)
        else {
            "id": call.get("id"),
            "type": "function",
            "function": {"name": call.get("name"), "arguments": call.get("arguments")},
        }
        for call in found
    ]
    return {**message, "tool_calls": shaped}


def listed(value: Any, where: str, role: str) -> list[Any]:
    """Return a conversation as a list of messages. A text becomes one message with the given role.

    A text is parsed only if it is the JSON of messages. An answer may be other JSON.

    Raises:
        DataError: If the value is neither a list nor text.
    """
    if isinstance(value, str):
        found = [] if role == "user" and value.strip() == "[]" else parsed(value, where)
        value = found if isinstance(found, list) else [{"role": role, "content": value}]
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad(where, "messages or text", value)
    return [with_calls(message, f"{where}[{index}]") for index, message in enumerate(value)]


def steps_of(
    prompt: Sequence[Any],
    completion: Sequence[Any],
    where: str,
    tools: tuple[Mapping[str, Any], ...] = (),
    trained: Callable[[Mapping[str, Any], str], bool] = lambda message, where: True,
    rewards: Sequence[float | None] = (),
) -> tuple[Step, ...]:
    """Return the answers of a conversation, which are the assistant messages of the completion.

    Args:
        prompt: Messages before the first answer.
        completion: Messages from the first answer on.
        where: Location of the conversation, for error messages.
        tools: Schemas of the tools.
        trained: Returns whether an assistant message is trained on, given the message and its location.
        rewards: Reward of each answer, None for an answer without one; empty if there are none.

    Raises:
        DataError: If a message has an unknown format, or the completion holds no answer.
    """
    heard = list(messages_of(list(prompt), f"{where}: prompt")) if prompt else []
    steps = []
    for index, message in enumerate(completion):
        at, role = f"{where}: message {index}", mapping(message).get("role")
        if role in CALL_ROLES:
            raise DataError(
                f"{at}: expected an assistant message, got a message of the role {role}. Put its calls under "
                "tool_calls of the assistant message."
            )
        if role == "assistant":
            action = answer_of(message, at) or Action("")
            steps.append(Step(tuple(heard), action, tools, trained=trained(message, at)))
            heard.append(action.message())
        else:
            heard += messages_of([message], at)
    if not steps:
        raise DataError(f"{where}: expected an assistant message after the prompt, got none.")
    if not rewards:
        return tuple(steps)
    return tuple(replace(step, reward=reward) for step, reward in zip(steps, rewards, strict=True))


def numbers(value: Any, where: str, kind: type = float, length: int | None = None) -> list[Any]:
    """Check that a value is a list of numbers, or of token ids if the kind is int, and return it.

    Raises:
        DataError: If the value is not such a list, or its length differs from `length`.
    """
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(value, list) or any(
        isinstance(each, bool) or not isinstance(each, allowed) for each in value
    ):
        raise bad(where, f"a list of {'numbers' if kind is float else 'whole numbers'}", value)
    if any(isinstance(each, int) and abs(each) > LARGEST for each in value):
        raise DataError(f"{where}: expected numbers of at most {LARGEST:g}, got a larger one.")
    if length is not None and len(value) != length:
        raise DataError(f"{where}: expected {length} entries, one for each token, got {len(value)}.")
    return value


def steps_of_tokens(
    held: Mapping[str, Any], names: TokenNames, where: str, fields: Fields
) -> tuple[Step, ...]:
    """Return the answers of a rollout of token ids: each contiguous stretch of sampled response tokens is one answer.

    Args:
        held: Lists of one rollout by key, with an entry for each token.
        names: Keys of the lists.
        where: Location of the rollout, for error messages.
        fields: Fields that the user names, including the decoder of a tokenizer.

    Raises:
        DataError: If no tokenizer is named, if lengths differ, or if no token was sampled.
    """
    decode = fields.decode
    if decode is None:
        raise DataError(
            f"{where}: the record holds token ids without texts. Name the model that sampled them with --model, whose "
            "tokenizer decodes them."
        )
    prompt = numbers(held.get(names.prompt), f"{where}: {names.prompt}", int)
    response = numbers(held.get(names.response), f"{where}: {names.response}", int)
    count = len(response)
    mask = [1] * count
    if held.get(names.mask) is not None:
        mask = numbers(held[names.mask], f"{where}: {names.mask}", float, count)
    logprobs = None
    if held.get(names.logprobs) is not None:
        logprobs = numbers(held[names.logprobs], f"{where}: {names.logprobs}", float, count)
    rewards = None
    if isinstance(held.get(names.rewards), list):
        rewards = numbers(held[names.rewards], f"{where}: {names.rewards}", float, count)
    messages = conversation_of(decode(prompt, True))
    steps: list[Step] = []
    for sampled, stretch in groupby(range(count), key=lambda at: mask[at] != 0):
        tokens = list(stretch)
        ids = response[tokens[0] : tokens[-1] + 1]
        if not sampled:
            messages += conversation_of(decode(ids, True))
            paid = sum(rewards[at] for at in tokens) if rewards else 0.0
            if steps and rewards:
                steps[-1] = replace(steps[-1], reward=(steps[-1].reward or 0.0) + paid)
            continue
        chosen = tuple(logprobs[at] for at in tokens) if logprobs else None
        action = Action(decode(ids, False), tuple(ids), chosen)
        reward = sum(rewards[at] for at in tokens) if rewards else None
        steps.append(Step(tuple(messages), action, reward=reward))
        messages.append(action.message())
    if not steps:
        raise DataError(f"{where}: {names.response}: expected sampled tokens, got none.")
    return tuple(steps)


class TokenNames:
    """Keys under which a format keeps the token lists of a rollout."""

    def __init__(
        self, prompt: str, response: str, mask: str = "", logprobs: str = "", rewards: str = ""
    ) -> None:
        self.prompt, self.response, self.mask = prompt, response, mask
        self.logprobs, self.rewards = logprobs, rewards


def rows_of_columns(record: Mapping[str, Any], key: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a record that holds a list for each key, and the location of each row.

    Values that are no lists, such as metrics of the batch, are left out of the rows. A list of another length is an
    error.
    """
    first = record.get(key)
    if not isinstance(first, list):
        raise bad(f"{where}: {key}", "a list with an entry for each rollout", first)
    columns = {
        name: value for name, value in record.items() if isinstance(value, list) and len(value) == len(first)
    }
    for name in (each for each, value in record.items() if isinstance(value, list) and each not in columns):
        raise DataError(
            f"{where}: {name}: expected {len(first)} entries, one for each of {key}, got {len(record[name])}."
        )
    for index in range(len(first)):
        yield f"{where}[{index}]", {name: value[index] for name, value in columns.items()}


def cut_last(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Mark the last answer of a rollout as cut at a token limit."""
    return (*steps[:-1], replace(steps[-1], answer=replace(steps[-1].answer, ended=False))) if steps else ()
