"""The one place that turns a conversation into token ids with a turn index for each token.

Text is tokenized once, piece by piece, as it enters the conversation, and as it would be within the whole of it; ids
that were sampled are kept as they are. So what a policy sees at turn k is a prefix of what it sees at turn k+1, and
training sees what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturn.episodes.tool_calls import ToolCall, chat_call, parse_text
from perturn.errors import DataError, ModelError
from perturn.types import Action, Message, Prompt, Trajectory, Turn

NO_TURN = -1
"""Turn index of a token that carries no loss."""

TOOLS_TEMPLATE = Path(__file__).parent / "tools.jinja"
"""A chat template with tools, for tokenizers of ChatML's tokens whose own has none."""

_PROBE = "\u2063probe\u2063"

_ANCHORS = ("\n", ":", "a")
"""Texts to tokenize an answer after, where the tokenizer merges its beginning with the end of the prompt."""


@dataclass(frozen=True)
class Piece:
    """Tokens that entered the conversation together."""

    ids: tuple[int, ...]
    role: str
    turn: int
    """Index of the turn whose action these tokens are; `NO_TURN` for text the policy did not write."""


@dataclass(frozen=True)
class Encoded:
    """A trajectory as tokens. All tuples are [tokens]."""

    ids: tuple[int, ...]
    turn: tuple[int, ...]
    """Turn index where a token carries loss, `NO_TURN` elsewhere."""
    role: tuple[str, ...]
    dropped_turns: int = 0
    """Whole turns cut from the end to keep the length limit."""

    @property
    def turns(self) -> int:
        """Number of turns that carry loss."""
        return len(set(self.turn) - {NO_TURN})


class Renderer:
    """Conversation -> tokens, for one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """Check that the template is append-only and that pieces are tokenized alike; find what ends a turn.

        Args:
            tokenizer: A Hugging Face tokenizer.
            chat_template: Template text to use instead of the tokenizer's own.

        Raises:
            ModelError: If there is no template or it cannot be used for many turns with this tokenizer.
        """
        self.tokenizer = tokenizer
        self.template = chat_template or tokenizer.chat_template
        if not self.template:
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; give one with `chat_template`."
            )
        self.end_id = self._find_end_of_turn()
        self.end_text = self._decode([self.end_id])
        self._check_template()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Tokens an engine continues: everything up to the place where the policy starts to write."""
        pieces = self._pieces(prompt.messages, prompt.turns, prompt.tools, newest=prompt.observation)
        return [token for piece in pieces for token in piece.ids]

    def encode(self, trajectory: Trajectory, max_length: int | None = None) -> Encoded:
        """Tokens of a whole trajectory; turns that do not fit in `max_length` tokens are dropped from the end.

        Raises:
            DataError: If the trajectory has no turn, not even the first one fits, or it was played with a shortened
                history and so is not one sequence.
        """
        trajectory.require_full_history()
        if not trajectory.turns:
            raise DataError(
                f"trajectory of task {trajectory.task.id!r} has no assistant turn; remove the row."
            )
        for index, turn in enumerate(trajectory.turns):
            _check_action(turn.action, f"task {trajectory.task.id!r}: turns[{index}].action")
            if not (turn.action.text or turn.action.tool_calls or turn.action.token_ids):
                raise DataError(
                    f"task {trajectory.task.id!r}: turns[{index}].action is empty; remove the row."
                )
        kept: list[Piece] = []
        pending: list[Piece] = []
        length = 0
        for piece in self._pieces(trajectory.prompt, trajectory.turns, trajectory.tools):
            pending.append(piece)
            if piece.turn == NO_TURN:
                continue
            length += sum(len(part.ids) for part in pending)
            if max_length is not None and length > max_length:
                break
            kept += pending
            pending = []
        if not kept:
            raise DataError(
                f"trajectory of task {trajectory.task.id!r}: its first turn ends at token {length}, but max_length "
                f"is {max_length}; raise max_length or shorten the prompt."
            )
        played = sum(piece.turn != NO_TURN for piece in kept)
        return Encoded(
            ids=tuple(token for piece in kept for token in piece.ids),
            turn=tuple(piece.turn for piece in kept for _ in piece.ids),
            role=tuple(piece.role for piece in kept for _ in piece.ids),
            dropped_turns=len(trajectory.turns) - played,
        )

    def action(self, ids: Sequence[int], logprobs: Sequence[float]) -> Action:
        """Sampled tokens -> an action that keeps them."""
        ended = bool(ids) and ids[-1] == self.end_id
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
        return Action(text=text, token_ids=tuple(ids), logprobs=tuple(logprobs), ended=ended)

    def require_tools(self) -> None:
        """Refuse a template that shows no tools, or writes calls in a way that would not be read back.

        Raises:
            ModelError: Naming what is missing.
        """
        call = ToolCall("find_lamp", {"room": "hall", "count": 2})
        tools = [{"type": "function", "function": {"name": call.name, "description": "", "parameters": {}}}]
        asked: list[Message] = [{"role": "user", "content": "a"}]
        opened = self._render(asked, tools, generate=True)
        wrote: Message = {"role": "assistant", "content": "", "tool_calls": [chat_call(call)]}
        written = self._added(opened, self._render([*asked, wrote], tools), "an assistant message")
        read = parse_text(written.partition(self.end_text)[0])
        if call.name not in opened or read is None or read.calls != (call,):
            raise ModelError(
                f"the chat template of {self.tokenizer.name_or_path!r} shows no tools, or writes calls otherwise than "
                "as JSON between <tool_call> and </tool_call>, so format 'tools' cannot be played; set "
                "model.chat_template=tools for a template that does, or to a file of yours."
            )

    def _pieces(
        self,
        prompt: Sequence[Message],
        turns: Sequence[Turn],
        tools: Sequence[Any],
        newest: Sequence[Message] | None = None,
    ) -> Iterator[Piece]:
        """Walk the conversation; each step renders a turn more and tokenizes what the template added.

        Args:
            prompt: Messages before the first turn.
            turns: The turns.
            tools: Tool schemas.
            newest: An observation to be answered; None: the turns are all, and each message is a piece of its own.
        """
        messages: list[Message] = []
        text = ""
        rest = list(prompt)
        for index, turn in enumerate(turns):
            new, rest = [*rest, *turn.observation], []
            opened = self._open(text, messages, new, tools)
            ids = self._tokenize_after(self._end_of(text), opened[len(text) :])
            if newest is None:
                yield from self._by_role(ids, text, opened, messages, new, tools)
            else:
                yield Piece(ids, _role(new), NO_TURN)
            messages += [*new, turn.action.message()]
            answer = self._added(opened, self._render(messages, tools), "an assistant message")
            end = answer.rfind(self.end_text)
            if end < 0:
                raise ModelError(
                    f"the chat template did not close an assistant message with {self.end_text!r}."
                )
            written = answer[: end + len(self.end_text)]
            self._check_tool_calls(messages, tools, written, index)
            if turn.action.token_ids is None:
                heard = self._end_of(text) + opened[len(text) :]
                yield Piece(self._tokenize_after(heard, written), "assistant", index)
            else:
                yield Piece(turn.action.token_ids, "assistant", index)
                if not turn.action.ended:  # the policy was cut off: what closes its turn is not its own
                    written = answer[:end]
            text = opened + written
        if newest is not None:
            new = [*rest, *newest]
            opened = self._open(text, messages, new, tools)
            yield Piece(self._tokenize_after(self._end_of(text), opened[len(text) :]), _role(new), NO_TURN)

    def _open(
        self, text: str, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any]
    ) -> str:
        """The conversation with messages the policy reads and the opening of its own turn.

        Args:
            text: The conversation tokenized so far.
            before: Its messages.
            new: Messages to add.
            tools: Tool schemas.
        """
        opened = self._render([*before, *new], tools, generate=True)
        self._added(text, opened, f"a {new[-1]['role']} message" if new else "an assistant message")
        return opened

    def _by_role(
        self,
        ids: tuple[int, ...],
        text: str,
        opened: str,
        before: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Any],
    ) -> Iterator[Piece]:
        """The tokens of what the policy reads, divided where the next message begins."""
        start = 0
        for count, message in enumerate(new[:-1], start=1):
            part = self._try_render([*before, *new[:count]], tools)
            if part is None or not (part.startswith(text) and opened.startswith(part)):
                continue
            alone = self._tokenize_after(self._end_of(text), part[len(text) :])
            end = _first_difference(alone, ids)
            if end > start:
                yield Piece(ids[start:end], str(message["role"]), NO_TURN)
                start = end
        yield Piece(ids[start:], _role(new), NO_TURN)

    def _end_of(self, text: str) -> str:
        """The token that closed a turn, if one did: it decides how text after this one is tokenized."""
        return self.end_text if text.endswith(self.end_text) else ""

    def _tokenize_after(self, before: str, text: str) -> tuple[int, ...]:
        """Tokens of a text as they are where it follows another one, whose own tokens stay as they are.

        Some tokenizers put a space before whatever they are given, so a text alone may begin with another token. Where
        one would reach over the seam, the text begins with a token of its own, as it does for a policy that continues
        the tokens of the prompt.
        """
        for context in (before, *_ANCHORS):
            known, both = self._tokenize(context), self._tokenize(context + text)
            if both[: len(known)] == known:
                return both[len(known) :]
        raise ModelError(
            f"the tokenizer {self.tokenizer.name_or_path!r} changes the tokens of what comes before a text that begins "
            f"with {text[:30]!r}, so turns cannot be told apart; give a `chat_template` whose prompts end in a special "
            "token or a line break."
        )

    def _tokenize(self, text: str) -> tuple[int, ...]:
        if any("\ud800" <= each <= "\udfff" for each in text):
            raise DataError(
                "the text has half of a surrogate pair, which no tokenizer reads; correct the row."
            )
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], generate: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=self.template,
                    add_generation_prompt=generate,
                    tokenize=False,
                )
            )
        except Exception as error:  # a template is code of others
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"the chat template cannot render this conversation: {reason}") from error

    def _try_render(self, messages: Sequence[Message], tools: Sequence[Any]) -> str | None:
        """Render a conversation that some templates refuse, such as one that stops after the system message."""
        try:
            return self._render(messages, tools)
        except ModelError:
            return None

    def _added(self, before: str, after: str, what: str) -> str:
        """The text that the template appended.

        Raises:
            ModelError: If it changed the text that was already there.
        """
        if after.startswith(before):
            return after[len(before) :]
        same = _first_difference(before, after)
        raise ModelError(
            f"the chat template of {self.tokenizer.name_or_path!r} is not append-only: adding {what} changed earlier "
            f"text from {before[same : same + 30]!r} to {after[same : same + 30]!r}. A policy trained on it would see "
            "other tokens than it sampled. Give a template that keeps earlier turns as they are with `chat_template` "
            "(for models that drop earlier thoughts: the same template without that rule)."
        )

    def _check_tool_calls(
        self, messages: Sequence[Message], tools: Sequence[Any], written: str, turn: int
    ) -> None:
        """Refuse a template that leaves out tool calls, so that an action does not reach the tokens.

        Which tool is called is up to the policy, and a template may write a strange name otherwise than it is, such as
        with an escaped quote. So a name that is not found is replaced by a plain one before the template is blamed.
        """
        calls = [dict(call.get("function", call)) for call in messages[-1].get("tool_calls", ())]
        if all(str(call.get("name", "")) in written for call in calls):
            return
        renamed = [
            {"type": "function", "function": {**call, "name": f"probe_{n}"}} for n, call in enumerate(calls)
        ]
        text = self._render([*messages[:-1], {**messages[-1], "tool_calls": renamed}], tools)
        left_out = [str(call.get("name")) for n, call in enumerate(calls) if f"probe_{n}" not in text]
        if left_out:
            raise ModelError(
                f"the chat template leaves out tool calls: turn {turn} calls {left_out[0]!r}, but the text is "
                f"{written!r}. Give a template that writes them with `chat_template`."
            )

    def _find_end_of_turn(self) -> int:
        """The special token that closes an assistant message."""
        messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        tail = self._render(messages, ()).rpartition(_PROBE)[2]
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        for token in self._tokenize(tail):
            if token in special:
                return int(token)
        raise ModelError(
            f"the chat template of {self.tokenizer.name_or_path!r} does not close an assistant message with a special "
            f"token (it adds {tail!r}), so a policy could not learn to end its turn; give another `chat_template`."
        )

    def _check_template(self) -> None:
        """Refuse a template that rewrites history, or pieces that are not the whole, before any work starts."""
        turns = [
            Turn(
                ({"role": "user", "content": f"observation {i}"},),
                Action(f"<think>\nwhy {i}\n</think>\n\nact {i}" if i else "act"),
            )
            for i in range(3)
        ]
        system: Message = {"role": "system", "content": "system"}
        prompt = () if self._try_render([system, *turns[0].observation], ()) is None else (system,)
        ids = [token for piece in self._pieces(prompt, turns, ()) for token in piece.ids]
        shown = [
            *prompt,
            *(message for turn in turns for message in (*turn.observation, turn.action.message())),
        ]
        self._check_pieces(ids, self._render(shown, ()).rpartition(self.end_text)[0] + self.end_text)

    def _check_pieces(self, ids: list[int], text: str) -> None:
        """Refuse tokens of pieces that stand for another text than those of the whole.

        They may be other tokens: a policy continues the tokens of its prompt, even if the tokenizer would merge the
        last of them with what follows.
        """
        whole = list(self._tokenize(text))
        pieces, expected = self._decode(ids), self._decode(whole)
        if ids != whole and pieces != expected:
            same = _first_difference(pieces, expected)
            raise ModelError(
                f"the tokenizer {self.tokenizer.name_or_path!r} gives a conversation other tokens turn by turn than as "
                f"a whole: {pieces[same : same + 30]!r} instead of {expected[same : same + 30]!r}, after "
                f"{expected[max(0, same - 30) : same]!r}. A policy would learn other tokens than it samples. Give a "
                "`chat_template` whose prompts end in a special token or a line break."
            )


def _role(messages: Sequence[Message]) -> str:
    """Who is heard last; the system, where nobody is."""
    return str(messages[-1]["role"]) if messages else "system"


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that both have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _check_action(action: Action, where: str) -> None:
    """Refuse ids that no tensor holds, and calls that no template reads."""
    for index, token in enumerate(action.token_ids or ()):
        if not 0 <= token < 2**31:
            raise DataError(
                f"{where}.token_ids[{index}]: expected a token id, got {token:.4g}; remove the row."
            )
    for index, call in enumerate(action.tool_calls):
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}.tool_calls[{index}]: expected the name of a function, got {call!r:.80}; remove the row."
            )
