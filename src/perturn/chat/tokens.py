"""Conversion of conversations to token ids, with a turn index for each token; no other module does this.

Each text is tokenized once, when it enters the conversation, with the tokens that it would have within the whole
conversation. Sampled token ids are never tokenized again. So the prompt of turn k is a prefix of the prompt of turn
k+1, and training uses exactly the sampled tokens.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

from perturn.chat.control_tokens import end_ids
from perturn.chat.encoded import Encoded as Encoded
from perturn.chat.encoded import Runs
from perturn.chat.rendering import NO_TURN as NO_TURN
from perturn.chat.rendering import ChatTemplate, first_difference
from perturn.chat.template_walk import Asked, Piece, Walk, check_turns
from perturn.chat.templates import choose_template, fitting, with_template
from perturn.chat.tool_probe import check_shown, tool_fault
from perturn.episodes.calls.find_calls import (
    THOUGHT_MARKS,
    kept_tokens,
    thought_tokens,
    with_plain_thoughts,
)
from perturn.episodes.prompts import sequences_of
from perturn.errors import DataError, ModelError
from perturn.types import Action, Message, Prompt, Trajectory, Turn

_KEPT, _KEPT_TOKENS = 4096, 2**25
"""Largest numbers of conversations and of their tokens in the cache; the least recently used is dropped first."""

_NO_WORD = re.compile(r"\W+")

_PROBE_TURNS = 5
"""Number of turns of the test conversation: a walk leaves out earlier messages from the fourth turn on."""


class Renderer:
    """Converts conversations to tokens, for one tokenizer and its chat template.

    A `Walk` renders and tokenizes each message once, when it is added. The result is compared with one rendering of the
    whole conversation: for every training sequence, and for a prompt each time the number of turns has doubled. Prompts
    of templates that use `namespace` are always compared. If a template renders a message differently because of
    messages far before it, all messages are rendered at each turn, which takes quadratic time.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None, *, ends: Iterable[int] = ()) -> None:
        """Choose the chat template, and check that it can be used for conversations of many turns.

        Args:
            tokenizer: A Hugging Face tokenizer.
            chat_template: Template to use instead of the tokenizer's own: the name of one of Perturn's templates, a
                file, or Jinja.
            ends: Ids of tokens that end an answer, besides the template's end of turn and the tokenizer's end of text;
                see `perturn.chat.control_tokens.declared_ends`.

        Raises:
            ConfigError: If there is no template of this name.
            ModelError: If the tokenizer has no template, or the template cannot be used for many turns.
        """
        try:
            self._prepare(tokenizer, choose_template(tokenizer, chat_template), ends)
        except ModelError as error:
            names = {} if chat_template is not None else _working(tokenizer)
            if not names:
                raise
            raise ModelError(
                f"{error} These of ours work with this tokenizer: {', '.join(names)}."
            ) from error

    def _prepare(self, tokenizer: Any, template: str | None, ends: Iterable[int]) -> None:
        self._chat = ChatTemplate(tokenizer, template)
        self.tokenizer = with_template(tokenizer, self._chat.text)
        self.template = self._chat.text
        self.end_id = self._chat.end_id
        self.end_ids = end_ids(
            tokenizer, self.end_id, self._chat.special_ids, (self._chat.call_end_id, *ends)
        )
        self.end_text = self._chat.end_text
        self._special = _special_tokens(tokenizer)
        self._thought_marks, self._marks = (
            {token for token, text in self._special.items() if text in kept}
            for kept in (thought_tokens(), kept_tokens())
        )
        self.control = self._chat.control
        self.probe_ids: list[int] = []
        """Token ids of the test conversation with which the template was checked."""
        self._whole = False
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._cached = 0  # tokens
        self._ids: dict[int, int] = {}  # one object per id, so that rows share it, and need less memory
        self._check_template()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: everything up to the policy's next answer."""
        asked = self.forget(prompt.conversation)
        if asked is None or not asked.leads_to(prompt):
            asked = self._ask(prompt)
        try:
            asked.follow(prompt)
        except ModelError:
            if asked.walk.whole:
                raise
            asked = self._ask(prompt, whole=True)
            asked.follow(prompt)
        self._asked[prompt.conversation] = asked
        self._cached += len(asked.ids)
        while len(self._asked) > _KEPT or (self._cached > _KEPT_TOKENS and len(self._asked) > 1):
            self._cached -= len(self._asked.popitem(last=False)[1].ids)
        return asked.ids.tolist()

    def forget(self, conversation: str) -> Asked | None:
        """Remove the tokens of a conversation's prompts from the cache, and return them."""
        asked = self._asked.pop(conversation, None)
        self._cached -= 0 if asked is None else len(asked.ids)
        return asked

    def encode(
        self, trajectory: Trajectory, max_length: int | None = None, *, every_turn: bool = False
    ) -> Encoded:
        """Return the tokens of a trajectory; turns that exceed `max_length` are dropped from the end.

        If a trajectory has several sequences, the limit holds for each. A turn that exceeds it is dropped with all
        turns that continue its sequence; turns of other sequences stay. If each turn continues the turn before it, all
        later turns are dropped.

        Args:
            trajectory: The trajectory.
            max_length: Limit on the length of each sequence in tokens; None: no limit.
            every_turn: Whether empty turns, and turns that are marked as not to be trained, also carry loss.

        Raises:
            DataError: If the trajectory has no turns, no turn carries loss, or not even the first turn fits.
        """
        self._check_turns(trajectory)
        silent = set() if every_turn else silent_turns(trajectory)
        if len(silent) == len(trajectory.turns):
            raise DataError(
                f"trajectory of task {trajectory.task.id!r} has no turn that carries loss: each is empty, cut, or "
                "marked as not to be trained; remove the row."
            )
        try:
            kept = self._sequences(trajectory, max_length, self._whole)
        except ModelError:
            if self._whole:
                raise
            kept = self._sequences(trajectory, max_length, whole=True)
        if not kept:
            first = replace(trajectory, turns=trajectory.turns[:1])
            length = len(self.encode(first, every_turn=True).ids)
            raise DataError(
                f"trajectory of task {trajectory.task.id!r}: its first turn ends at token {length}, but max_length "
                f"is {max_length}; drop the row, shorten the prompt, or raise max_length if the model allows it."
            )
        pieces = [piece for sequence in kept for piece in sequence]
        played = [trajectory.turns[piece.turn] for piece in pieces if piece.turn != NO_TURN]
        lengths = [sum(len(piece.ids) for piece in sequence) for sequence in kept]
        return Encoded(
            ids=tuple(self._ids.setdefault(token, token) for piece in pieces for token in piece.ids),
            turn=Runs((NO_TURN if piece.turn in silent else piece.turn, len(piece.ids)) for piece in pieces),
            role=Runs((piece.role, len(piece.ids)) for piece in pieces),
            dropped_turns=len(trajectory.turns) - len(played),
            starts=tuple(accumulate(lengths[:-1], initial=0)),
            quoted_turns=sum(bool(self.control_in(turn.action)) for turn in played),
        )

    def check(self, trajectory: Trajectory) -> None:
        """Check that a trajectory can be encoded, without tokenizing it.

        Raises:
            DataError: If training does not support the trajectory's turns or thoughts.
            ModelError: If the template cannot render the trajectory.
        """
        self._check_turns(trajectory)
        if trajectory.history is None or trajectory.is_one_sequence:
            for seen, _ in sequences_of(trajectory):
                chat = self._chat.with_variables(seen.template_kwargs)
                chat.render(seen.messages, seen.tools)
                check_shown(chat, [*seen.prompt, *seen.turns[0].observation], seen.tools)

    def control_in(self, action: Action) -> list[str]:
        """Return the control tokens in an action's text; an empty list if the action has token ids."""
        return [] if action.token_ids else self.control.find([action.message()])

    def walk(self, trajectory: Trajectory, whole: bool = False) -> Walk:
        """Return a walk that starts before a trajectory's first turn; with `whole`, each step renders all messages."""
        chat = self._chat.with_variables(trajectory.template_kwargs)
        return Walk(chat, trajectory.prompt, trajectory.tools, whole or self._whole)

    def action(
        self, ids: Sequence[int], logprobs: Sequence[float], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Action:
        """Return sampled tokens as an action, which keeps the token ids.

        The action's text has no special tokens, except marks of thoughts without their other mark. Thoughts are between
        `<think>` and `</think>`. If tools are offered, special tokens of tool calls and thoughts stay in the text, so
        that `understand` can parse them.
        """
        ended = bool(ids) and ids[-1] in self.end_ids
        own, kept = ids[:-1] if ended else ids, self._marks if tools else self._thought_marks
        text = self._text(own, kept)
        if not tools and not kept.isdisjoint(own):
            text = with_plain_thoughts(text)
            for mark in {self._special[token] for token in kept} - THOUGHT_MARKS:
                text = text.replace(mark, "")
        return Action(text=text, token_ids=tuple(ids), logprobs=tuple(logprobs), ended=ended)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def require_tools(self) -> None:
        """Raise a `ModelError` if the template shows no tools, or writes calls that Perturn cannot parse."""
        if (fault := self._tool_fault()) is None:
            return
        names = [name for name, each in _working(self.tokenizer).items() if each._tool_fault() is None]
        others = f"one of {', '.join(names)}" if names else "a file of yours that shows tools"
        raise ModelError(f"format 'tools' cannot be played: {fault}. Set model.chat_template to {others}.")

    def _tool_fault(self) -> str | None:
        return tool_fault(self._chat, lambda ids: self._text(ids, self._marks))

    def _check_turns(self, trajectory: Trajectory) -> None:
        check_turns(trajectory)
        thoughts = self._chat.with_variables(trajectory.template_kwargs).thoughts
        for number, turn in enumerate(trajectory.turns):
            if turn.action.token_ids is None:
                where = f"task {trajectory.task.id!r}: turns[{number}].action.text"
                thoughts.refuse_second(turn.action.text, where)

    def _text(self, ids: Sequence[int], kept: Set[int]) -> str:
        """Return the text of sampled tokens without special tokens, except for the special tokens `kept`."""
        if kept.isdisjoint(ids):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        shown = [token for token in ids if token in kept or token not in self._special]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False))

    def _ask(self, prompt: Prompt, whole: bool = False) -> Asked:
        chat = self._chat.with_variables(prompt.template_kwargs)
        return Asked(Walk(chat, prompt.messages, prompt.tools, whole or self._whole), prompt)

    def _sequences(self, trajectory: Trajectory, most: int | None, whole: bool) -> list[list[Piece]]:
        """Return the pieces of each sequence, with the turns that fit; an empty list if no turn fits."""
        found = []
        for seen, own in sequences_of(trajectory):
            kept, read = self._fit(seen, most, whole), len(seen.turns) - len(own)
            if len(kept) > read:
                pieces = chain.from_iterable(kept)
                found.append(
                    [
                        replace(one, turn=own[one.turn - read] if one.turn >= read else NO_TURN)
                        for one in pieces
                    ]
                )
            elif trajectory.is_linear:
                break
        return found

    def _fit(self, seen: Trajectory, most: int | None, whole: bool) -> list[list[Piece]]:
        """Return the pieces of each turn of a sequence that fits the limit; a turn's last piece is its action."""
        walk = self.walk(seen, whole)
        kept: list[list[Piece]] = []
        length = 0
        for turn in seen.turns:
            heard = walk.hear(turn.observation)
            pieces = [*walk.by_role(heard), walk.say(turn.action)]
            _check_thought(turn.action, walk)
            length += sum(len(piece.ids) for piece in pieces)
            if most is not None and length > most:
                break
            kept.append(pieces)
        walk.confirm()
        return kept

    def _check_template(self) -> None:
        """Reject a template that rewrites earlier turns, or a tokenizer whose pieces do not add up to the whole."""
        turns = [
            Turn(
                ({"role": "user", "content": f"observation {i}"},),
                Action(f"<think>\nwhy {i}\n</think>\n\nact {i}" if i else "act"),
            )
            for i in range(_PROBE_TURNS)
        ]
        system: Message = {"role": "system", "content": "system"}
        begun = self._chat.try_render([system, *turns[0].observation], (), generate=True)
        prompt = () if begun is None else (system,)
        ids = self.probe_ids = self._probe(prompt, turns, whole=True)
        try:
            self._whole = self._probe(prompt, turns, whole=False) != ids
        except ModelError:
            self._whole = True
        shown = [
            *prompt,
            *(message for turn in turns for message in (*turn.observation, turn.action.message())),
        ]
        self._check_pieces(ids, self._chat.render(shown, ()).rpartition(self.end_text)[0] + self.end_text)

    def _probe(self, prompt: Sequence[Message], turns: Sequence[Turn], whole: bool) -> list[int]:
        """Return the token ids of a test conversation."""
        walk = Walk(self._chat, prompt, (), whole)
        pieces = [piece for turn in turns for piece in (walk.hear(turn.observation), walk.say(turn.action))]
        walk.confirm()
        return [token for piece in pieces for token in piece.ids]

    def _check_pieces(self, ids: list[int], text: str) -> None:
        """Raise a `ModelError` if the tokens of all pieces decode to another text than the tokens of the whole.

        Different tokens for the same text are fine: a policy continues the tokens of its prompt, even if the tokenizer
        would merge the prompt's last token with the next text.
        """
        whole = list(self._chat.tokenize(text))
        pieces, expected = self._chat.decode(ids), self._chat.decode(whole)
        if ids != whole and pieces != expected:
            same = first_difference(pieces, expected)
            raise ModelError(
                f"the tokenizer {self.tokenizer.name_or_path!r} gives a conversation other tokens turn by turn than as "
                f"a whole: {pieces[same : same + 30]!r} instead of {expected[same : same + 30]!r}, after "
                f"{expected[max(0, same - 30) : same]!r}. A policy would learn other tokens than it samples. Give a "
                "`chat_template` whose prompts end in a special token or a line break."
            )


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a tokenizer's special tokens by their ids."""
    added = {token: str(each) for token, each in tokenizer.added_tokens_decoder.items() if each.special}
    return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)) | added


def _working(tokenizer: Any) -> dict[str, Renderer]:
    """Return renderers of Perturn's templates that work with a tokenizer for many turns, by name of the template."""
    found = {}
    for name in fitting(tokenizer):
        with suppress(ModelError):
            found[name] = Renderer(tokenizer, name)
    return found


def _check_thought(action: Action, walk: Walk) -> None:
    """Raise a `ModelError` if the template leaves out the thought of a turn: a policy would not learn it."""
    if action.token_ids is not None:
        return
    within, closed, _ = action.text.partition("</think>")
    written = _NO_WORD.sub("", walk.written)
    for thought in (action.reasoning, within.rpartition("<think>")[2] if closed else ""):
        if _NO_WORD.sub("", thought) in written:
            continue
        raise ModelError(
            f"the chat template leaves out thoughts: turn {walk.turns - 1} thinks {thought[:60]!r}, but is written as "
            f"{walk.written[:60]!r}. Give a template that writes them with `chat_template` (perturn list templates)."
        )


def silent_turns(trajectory: Trajectory) -> set[int]:
    """Return the indices of turns without loss: empty turns, and turns that are marked as not to be trained."""
    return {index for index, turn in enumerate(trajectory.turns) if not turn.carries_loss}
