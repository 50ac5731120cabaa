"""Answers that a policy did not give, at each point of an episode where it could have: tokens of all branches.

The branches of an episode begin as it does, so that a packed batch computes it once and of each branch an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from unicodedata import normalize

from perturn.chat.tokens import NO_TURN, Encoded, Renderer
from perturn.episodes.prompts import context_of
from perturn.errors import DataError, ModelError
from perturn.types import Action, Task, Trajectory, Turn

MARK = "{answer}"
"""Where the answer stands in the text of a turn that gives one."""

GOLD = "answer"
"""Key of a task's data under which its gold answer is, as a text."""


def gold_answer(task: Task) -> str:
    """Return the gold answer of a task, in Unicode's NFC: the form that most tokenizers write a text in.

    Raises:
        DataError: If the task has none.
    """
    found = task.data.get(GOLD)
    if not isinstance(found, str) or not found.strip():
        raise DataError(
            f"task {task.id!r:.80} has no gold answer: expected a text in data[{GOLD!r}], got {found!r:.80}. Take an "
            "environment whose tasks have one, such as hotpotqa, or a credit that reads none, such as rloo."
        )
    return normalize("NFC", found.strip())


@dataclass(frozen=True)
class Branch:
    """An answer after what the policy had seen."""

    ids: tuple[int, ...]
    """Tokens up to the end of the turn that gives it."""
    start: int
    """Where the tokens of the answer begin."""
    stop: int
    """Where they end."""


def branches(renderer: Renderer, trajectory: Trajectory, form: str) -> list[Branch | None]:
    """Return the gold answer before each turn of an episode and after its last one; see `branches_of`.

    Raises:
        DataError: If the task has no gold answer.
        ModelError: If the template or the tokenizer writes another text than the answer.
    """
    found = branches_of(renderer, trajectory, form, [gold_answer(trajectory.task)])
    return [None if each is None else each[0] for each in found]


def branches_of(
    renderer: Renderer, trajectory: Trajectory, form: str, answers: Sequence[str]
) -> list[list[Branch] | None]:
    """Return answers before each turn of an episode and after its last one.

    After the last turn the policy would speak twice in a row, since no prompt holds the world's reply to that
    turn.

    Args:
        renderer: Conversation -> tokens.
        trajectory: The episode.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        answers: Texts, none of them empty; at least one.

    Returns:
        One a turn and one more, each a branch for every answer; None for the last one where the chat template does not
        let the policy speak twice.

    Raises:
        ModelError: If the template or the tokenizer writes another text than an answer.
    """
    before, _, after = form.partition(MARK)
    said = [Action(f"{before}{answer}{after}") for answer in answers]
    try:
        found = _said(renderer, trajectory, said, whole=False)
    except ModelError:
        found = _said(renderer, trajectory, said, whole=True)
    spans: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}

    def branch(index: int, prompt: tuple[int, ...], own: tuple[int, ...]) -> Branch:
        if (index, own) not in spans:
            spans[index, own] = _span(renderer, own, answers[index], after)
        start, stop = spans[index, own]
        return Branch(prompt + own, len(prompt) + start, len(prompt) + stop)

    return [
        None if one is None else [branch(index, one[0], own) for index, own in enumerate(one[1])]
        for one in found
    ]


def as_sequences(found: Sequence[Branch]) -> Encoded:
    """Return branches as the sequences of one episode, each with loss on the tokens of the answer alone."""
    turn: list[int] = []
    for index, one in enumerate(found):
        own = [NO_TURN] * len(one.ids)
        own[one.start : one.stop] = [index] * (one.stop - one.start)
        turn += own
    starts = accumulate((len(one.ids) for one in found[:-1]), initial=0)
    ids = tuple(token for one in found for token in one.ids)
    return Encoded(ids, tuple(turn), ("assistant",) * len(ids), starts=tuple(starts))


_Said = tuple[tuple[int, ...], list[tuple[int, ...]]]
"""Tokens of a prompt, and of each of the turns that answer it."""


def _said(
    renderer: Renderer, trajectory: Trajectory, said: Sequence[Action], whole: bool
) -> list[_Said | None]:
    """Return the answer turn of each branch; an episode that is one sequence is walked along once."""
    if trajectory.is_one_sequence:
        return _along(renderer, trajectory, said, whole)
    found: list[_Said | None] = []
    for index, turn in enumerate((*trajectory.turns, Turn((), said[0]))):
        seen = context_of(replace(trajectory, turns=(*trajectory.turns[:index], turn)), index)
        try:
            found.append(_along(renderer, seen, said, whole)[-2])
        except ModelError:
            if index < len(trajectory.turns):
                raise
            found.append(None)  # roles that must alternate
    return found


def _along(
    renderer: Renderer, trajectory: Trajectory, said: Sequence[Action], whole: bool
) -> list[_Said | None]:
    """Return the answer turn of each branch of an episode that is one sequence."""
    walk, ids = renderer.walk(trajectory, whole), list[int]()
    found: list[_Said | None] = []
    for turn in trajectory.turns:
        ids += walk.hear(turn.observation).ids
        found.append((tuple(ids), [walk.fork().say(one).ids for one in said]))
        ids += walk.say(turn.action).ids
    after = walk.fork()
    walk.confirm()
    try:
        prompt = (*ids, *after.hear(()).ids)
        found.append((prompt, [after.fork().say(one).ids for one in said]))
    except ModelError:  # roles that must alternate
        found.append(None)
    return found


def _span(renderer: Renderer, ids: tuple[int, ...], answer: str, after: str) -> tuple[int, int]:
    """Return which tokens of a turn hold a character of its answer; a token that holds others as well is among them."""

    def text(count: int) -> str:
        return str(
            renderer.tokenizer.decode(
                ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    whole = text(len(ids))
    at = (whole.rpartition(renderer.end_text)[0] or whole).rfind(answer + after.rstrip())
    if at < 0:
        raise ModelError(
            f"the turn that gives the answer {answer!r:.80} reads {whole!r:.200} once it is tokenized; take a "
            "tokenizer and a chat template that keep a text as it is."
        )
    texts = [text(count) for count in range(len(ids) + 1)]
    start = max(count for count, each in enumerate(texts) if whole[:at].startswith(each))
    end = at + len(answer)
    return start, min(count for count, each in enumerate(texts) if each.startswith(whole[:end]))
