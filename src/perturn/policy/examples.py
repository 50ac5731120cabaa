"""Rows of training data as tokens: a trajectory or a preference pair, and the turns that carry loss."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from perturn.chat.rendering import NO_TURN, first_difference
from perturn.chat.tokens import Encoded, Renderer, silent_turns
from perturn.errors import DataError
from perturn.needs import Reference, reads
from perturn.types import PreferencePair, Trajectory, Turn, WeightedTrajectory

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)

SHARED_PREFIX = ("keep", "mask")
LOSS_ON = ("actions", "all")
_MANY_UNKNOWN = 0.01
"""Share of unknown tokens in a dataset from which on a warning is logged."""


@dataclass(frozen=True)
class Example:
    """One row of training data; `rejected` is None if the row is a single trajectory."""

    chosen: Encoded
    rejected: Encoded | None = None
    reference: tuple[Tensor, ...] = ()
    """For each side, reference log-probabilities, in nats [loss tokens]; empty if nothing reads them."""
    behavior: tuple[Tensor, ...] = ()
    """For each side, log-probabilities at sampling, in nats [loss tokens]; empty if nothing reads them."""
    proximal: tuple[Tensor, ...] = ()
    """For each side, log-probabilities under the policy before training, in nats [loss tokens]; empty if nothing reads
    them."""
    inputs: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """For each side, log-probabilities under other frozen policies, in nats [loss tokens], by the input's name."""
    trajectories: tuple[Trajectory, ...] = ()
    """For each side, the trajectory with only its turns that carry loss."""
    whole: tuple[Trajectory, ...] = ()
    """For each side, the trajectory with all of its turns."""
    weight: tuple[Tensor, ...] = ()
    """For each side, the credit's weight of the turns that carry loss, without unit [turns]."""
    clip: tuple[Tensor, ...] = ()
    """For each side, the factor on the clip range of the turns that carry loss, without unit [turns]; empty: 1."""
    mismatched: Encoded | None = None
    """This row's prompt followed by the actions of another row; None if the loss does not read it."""
    mismatched_logprobs: Mapping[str, Tensor] = field(default_factory=dict)
    """Log-probabilities of `mismatched`, in nats [loss tokens], by the frozen policy's name, such as `reference`."""
    statistic: float | list[float] | None = None
    """Statistic over all pairs of an optimizer step; None if the loss reads no statistic."""
    has_spread: bool = True
    """Whether the weights of the trajectory's group differ from 0; see `WeightedTrajectory`."""

    @property
    def sides(self) -> tuple[Encoded, ...]:
        """Chosen side, and the rejected side if the row is a pair."""
        return (self.chosen,) if self.rejected is None else (self.chosen, self.rejected)


def encode_example(
    row: Trajectory | WeightedTrajectory | PreferencePair,
    renderer: Renderer,
    max_length: int | None,
    shared_prefix: str = "keep",
    loss_on: str = "actions",
    own_turns: bool = False,
) -> Example:
    """Convert a row into tokens.

    Args:
        row: A trajectory, with or without weights, or a pair of trajectories.
        renderer: Converts conversations to tokens.
        max_length: Longest sequence in tokens; longer sequences lose turns from the end. None: no limit.
        shared_prefix: `keep`, or `mask` to remove the loss on the first turns that both sides of a pair share.
        loss_on: `actions`, or `all` for loss on every token of a trajectory, observations included.
        own_turns: Whether a branched episode carries loss only on the turns after its branching point. A row with
            weights may override this.

    Raises:
        DataError: If both sides of a pair have the same tokens, or a side has no turn left that carries loss.
    """
    said = None
    if isinstance(row, WeightedTrajectory):
        said, row = row.own_turns, row.trajectory
    if isinstance(row, Trajectory):
        chosen = renderer.encode(row, max_length, every_turn=True)
        chosen = _with_all(chosen) if loss_on == "all" else chosen
        if own_turns and row.origin is not None if said is None else said:
            chosen = _own_turns(row, chosen)
        chosen = _without_silent(row, chosen, "the trajectory")
        return Example(chosen, trajectories=(_with_loss(row, chosen),), whole=(row,))
    chosen, rejected = (
        renderer.encode(side, max_length, every_turn=True) for side in (row.chosen, row.rejected)
    )
    if chosen.ids == rejected.ids:
        raise DataError(_equal_sides(row, chosen, rejected, renderer))
    shared = _shared_turns(chosen, rejected) if shared_prefix == "mask" else 0
    chosen = _without_silent(row.chosen, chosen, "chosen")
    rejected = _without_silent(row.rejected, rejected, "rejected")
    shared = min(shared, chosen.loss_turns[-1], rejected.loss_turns[-1])  # each side keeps at least one turn
    chosen, rejected = _without_turns(chosen, shared), _without_turns(rejected, shared)
    trajectories = _with_loss(row.chosen, chosen), _with_loss(row.rejected, rejected)
    return Example(chosen, rejected, trajectories=trajectories, whole=(row.chosen, row.rejected))


def check_pair(pair: PreferencePair, renderer: Renderer, max_length: int | None) -> None:
    """Check that the sides of a pair have different tokens within the limit, mostly without tokenizing all turns.

    Sides with tool calls, tool results or thoughts are tokenized whole, since a template may reject a later turn.

    Raises:
        DataError: If both sides have the same tokens, or a side has no turn left that carries loss.
    """
    plain = all(map(_is_plain, (*pair.chosen.turns, *pair.rejected.turns)))
    if not plain or not differ_early(pair, renderer, max_length):
        encode_example(pair, renderer, max_length)


def _is_plain(turn: Turn) -> bool:
    """Return whether a turn holds only texts of the user and an answer without a thought."""
    message, roles = turn.action.message(), {each["role"] for each in turn.observation}
    is_text = message.keys() <= {"role", "content"} and "<think>" not in message["content"]
    return is_text and "user" in roles and roles <= {"system", "user"}


def differ_early(pair: PreferencePair, renderer: Renderer, max_length: int | None) -> bool:
    """Return whether the sides' tokens differ by the end of their first different turn, and fit the limit up to there.

    Later turns do not change these tokens, so they are not tokenized. False: only all turns can tell.
    """
    sides = pair.chosen, pair.rejected
    written = (
        [(turn.observation, turn.action.message(), turn.action.token_ids) for turn in side.turns]
        for side in sides
    )
    end = first_difference(*written) + 1
    begun = [replace(side, turns=side.turns[:end]) for side in sides if side.is_one_sequence]
    if len(begun) < 2 or not all(any(turn.carries_loss for turn in side.turns) for side in begun):
        return False
    one, other = (renderer.encode(side, every_turn=True) for side in begun)
    if max_length is not None and max(one.longest, other.longest) > max_length:
        return False
    return first_difference(one.ids, other.ids) < min(len(one.ids), len(other.ids))


def _equal_sides(row: PreferencePair, chosen: Encoded, rejected: Encoded, renderer: Renderer) -> str:
    """Return why both sides of a pair have the same tokens, and the remedy."""
    unknown = count_unknown([Example(chosen, rejected)], renderer.tokenizer)
    if unknown and row.chosen.messages != row.rejected.messages:
        return (
            f"chosen and rejected have the same tokens for task {row.chosen.task.id!r}: they differ in words that the "
            f"tokenizer does not know ({renderer.tokenizer.unk_token}). Choose a model that knows them, or remove the "
            "pair."
        )
    cut = " after truncation" if chosen.dropped_turns or rejected.dropped_turns else ""
    return f"chosen equals rejected{cut} for task {row.chosen.task.id!r}; remove the pair."


def _own_turns(branch: Trajectory, side: Encoded) -> Encoded:
    """Return a branched episode with loss only on the turns after its branching point.

    The episode from which it branched carries the loss on the shared turns.
    """
    if max(side.loss_turns, default=-1) < branch.taken_over:
        raise DataError(
            f"task {branch.task.id!r:.80}, sample {branch.sample}: none of the turns after the branching point, "
            f"from turn {branch.taken_over} on, fits the length limit; leave it out."
        )
    return _without_turns(side, branch.taken_over)


def _without_silent(trajectory: Trajectory, side: Encoded, name: str) -> Encoded:
    """Return the side without loss on empty turns and on turns that are marked as not to be trained."""
    if silent := silent_turns(trajectory):
        side = replace(side, turn=tuple(NO_TURN if turn in silent else turn for turn in side.turn))
    if not side.turns:
        empty = sum(turn.trained and not turn.carries_loss for turn in trajectory.turns)
        marked = sum(not turn.trained for turn in trajectory.turns)
        raise DataError(
            f"task {trajectory.task.id!r:.80}: {name} has no turn that carries loss: of {len(trajectory.turns)} turns "
            f"{empty} are empty or cut inside, {marked} are marked as not to be trained, and any "
            "other is cut by the length limit or masked; remove the row."
        )
    return side


def _with_all(side: Encoded) -> Encoded:
    """Return the side with loss on all tokens but the first of each sequence.

    Tokens of an observation count as tokens of the turn after it.
    """
    turns, turn, following = tuple(side.turn), [NO_TURN] * len(side.ids), NO_TURN
    for index in reversed(range(len(side.ids))):
        following = turns[index] if turns[index] != NO_TURN else following
        turn[index] = following
    for start in side.starts:
        turn[start] = NO_TURN
    return replace(side, turn=tuple(turn))


def _with_loss(trajectory: Trajectory, encoded: Encoded) -> Trajectory:
    """Return the trajectory with only its turns that carry loss."""
    kept = (trajectory.turns[turn] for turn in sorted(set(encoded.loss_turns)))
    return replace(trajectory, turns=tuple(replace(turn, follows=None, opening=None) for turn in kept))


def _shared_turns(chosen: Encoded, rejected: Encoded) -> int:
    """Return the number of first turns that have the same tokens in both sides."""
    same = first_difference(*(list(zip(side.ids, side.turn, strict=True)) for side in (chosen, rejected)))
    return min(_turns_before(chosen, same), _turns_before(rejected, same))


def _turns_before(side: Encoded, position: int) -> int:
    """Return the number of turns that end before a position."""
    last = {turn: index for index, turn in enumerate(side.turn) if turn != NO_TURN}
    return sum(index < position for index in last.values())


def _without_turns(side: Encoded, turns: int) -> Encoded:
    """Return the side without loss on its first `turns` turns."""
    return replace(side, turn=tuple(NO_TURN if turn < turns else turn for turn in side.turn))


def count_unknown(examples: Sequence[Example], tokenizer: Any) -> int:
    """Return how many tokens of a dataset stand for text that the tokenizer does not know.

    A tokenizer whose unknown token has another role, such as padding, is taken to know all text.
    """
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return 0
    return sum(side.ids.count(unknown) for side in sides(examples))


def notes_on_examples(examples: Sequence[Example], tokenizer: Any) -> list[str]:
    """Return sentences about cut answers, and about variables that the chat template does not read.

    Cut answers with token ids are not counted, since they are trained as sampled.
    """
    counts = Counter[str]()
    for example in examples:
        counts.update(count_changes(example, tokenizer))
    return notes_on_changes(counts)


_CUT = {
    "cut/plain": "at a token limit; they carry no loss on an end of turn.",
    "cut/inside": "in their reasoning or a tool call; they carry no loss.",
}
"""Sentence ends for cut answers, by their key in `count_changes`."""


def count_changes(example: Example, tokenizer: Any) -> Counter[str]:
    """Return the counts of a row for `notes_on_changes`; counts of several rows may be added."""
    given = {name for side in example.whole for name in side.template_kwargs}
    turns = (turn for side in example.whole for turn in side.turns)
    cut = [turn for turn in turns if turn.trained and turn.action.token_ids is None and not turn.action.ended]
    plain, inside = sum(turn.carries_loss for turn in cut), sum(turn.action.is_cut_inside for turn in cut)
    return Counter(given - _words(str(tokenizer.chat_template))) + Counter(
        {"cut/plain": plain, "cut/inside": inside}
    )


@cache
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def notes_on_changes(counts: Mapping[str, int]) -> list[str]:
    """Return the sentences of `notes_on_examples` from counts of `count_changes`."""
    return [f"{counts[key]} answers were cut {how}" for key, how in _CUT.items() if counts.get(key)] + [
        f"{count} rows have {name}, which the chat template does not read; remove it."
        for name, count in sorted(counts.items())
        if name not in _CUT
    ]


def warn_of_changes(name: str, examples: Sequence[Example], max_length: int | None, tokenizer: Any) -> None:
    """Log how much of a dataset the policy does not learn as it is written.

    These are turns that are dropped, actions that contain control tokens as plain text, and text that the tokenizer
    does not know. Variables that the chat template does not read are logged too, and answers that a token limit cut.

    Args:
        name: Name of the dataset.
        examples: Rows of the dataset.
        max_length: Length limit in tokens for which turns were dropped.
        tokenizer: Tokenizer of the policy.
    """
    unknown, tokens = count_unknown(examples, tokenizer), sum(len(side.ids) for side in sides(examples))
    if unknown > _MANY_UNKNOWN * tokens:
        _logger.warning(
            "%s: %d of %d tokens are %s, since the tokenizer does not know their text; the policy cannot tell these "
            "words apart. Choose a model that knows them.",
            name,
            unknown,
            tokens,
            tokenizer.unk_token,
        )
    for said in notes_on_examples(examples, tokenizer):
        _logger.warning("%s: %s", name, said)
    dropped = [side.dropped_turns for side in sides(examples) if side.dropped_turns]
    if dropped:
        _logger.warning(
            "%s: dropped %d turns from the end of %d trajectories to keep max_length=%s",
            name,
            sum(dropped),
            len(dropped),
            max_length,
        )
    if quoted := sum(side.quoted_turns for side in sides(examples)):
        _logger.warning(
            "%s: %d actions hold control tokens such as <|im_end|> in their text; the policy learns them as plain "
            "text, not as the tokens. perturn inspect --check names the rows.",
            name,
            quoted,
        )


def warn_of_equal_weights(examples: Sequence[Example], credit: Any) -> None:
    """Log that all turns have the weight 0, or that a credit which reads the reference gives them one weight."""
    weights = [weight for example in examples for side in example.weight for weight in side.tolist()]
    if weights and not any(weights):
        _logger.warning(
            "all %d turns have the weight 0, so they give no gradient. A credit of groups needs several "
            "trajectories of a task with different rewards; each conversation is a task of its own.",
            len(weights),
        )
    if not reads(credit.needs, Reference):
        return
    if len(weights) > 1 and len(set(weights)) == 1:
        _logger.warning(
            "%s gives all %d turns the weight %g, so this training does not tell turns apart. perturn inspect shows "
            "the confidence of each turn.",
            credit,
            len(weights),
            weights[0],
        )


def check_lengths(examples: Sequence[Example], limit: int | None, names: Sequence[str] = ()) -> None:
    """Reject sequences that are too long for the model.

    Args:
        examples: The rows.
        limit: Longest sequence that the model can be trained on, in tokens; None: no limit.
        names: Name of each row, for the error message; empty: rows are named by their index.

    Raises:
        DataError: If a sequence is too long; the message names the row with the longest sequence.
    """
    lengths = [max(side.longest for side in example.sides) for example in examples]
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        index, count = lengths.index(longest), sum(length > limit for length in lengths)
        raise DataError(
            f"the longest sequence has {longest} tokens ({names[index] if names else f'row {index}'}), but training "
            f"with this model is exact only up to {limit}; set max_length to {limit} or less to drop whole turns from "
            f"the end. {count} of {len(lengths)} rows are too long."
        )


def sides(examples: Sequence[Example]) -> Iterator[Encoded]:
    """Yield all sides of all examples, in order."""
    for example in examples:
        yield from example.sides
