"""Quantity `feedback`: log-likelihood gain of an action from seeing the environment's reply to the previous action."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import log, nan
from typing import Any, ClassVar

from perturn.extend import OPENS, DataError, ModelError, Need, Trajectory, Turn, check_fit, failed, groups_of
from perturn.extend.quantity_tools import (
    ACTED,
    NO_TURN,
    TOKEN_BUDGET,
    Computed,
    Encoded,
    Ground,
    Quantity,
    QuantityTraits,
    Reader,
    Renderer,
    Source,
    Step,
    compute_logprobs,
    context_of,
    exact_length,
    frozen,
)
from perturn.methods.infopo.infopo_credit import Feedback

_logger = logging.getLogger(__name__)


def feedback_gains(
    model: Any,
    renderer: Renderer,
    trajectories: Sequence[Trajectory],
    placeholder: str,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[float]]:
    """Return the gain in the next turn's log-likelihood from seeing the reply instead of a placeholder text.

        I_t = mean_j [log pi(y_j | ..., o_(t+1), y_<j) - log pi(y_j | ..., placeholder, y_<j)],   y of turn t + 1

    The episodes of a task are computed together, and a shared prefix of their contexts is computed once.

    Args:
        model: Causal language model on the device to compute on.
        renderer: Renderer of conversations to tokens, for the model.
        trajectories: Episodes, in any order.
        placeholder: Text that replaces each message of a reply.
        token_budget: Maximum number of tokens of one pass.

    Returns:
        Gains, in nats per token `[trajectories][turns]`. If several turns follow one turn, as after a retry, the
        gain is the mean over them. NaN if no turn follows, if there is no reply, if a turn would exceed the model's
        context, and in an episode that FAILED.

    Raises:
        ConfigError: If the placeholder contains control tokens of the chat template.
        DataError: If a turn cannot be encoded as tokens.
    """
    _check_placeholder(renderer, placeholder)
    found = [[nan] * len(one.turns) for one in trajectories]
    limit, left_out = exact_length(model), 0
    for group in groups_of(trajectories):
        played = zip(group.indices, group, strict=True)
        members = [i for i, one in played if len(one.turns) > 1 and not failed(one)]
        asked: dict[int, Encoded] = {}
        for i in members:
            encoded, dropped = _asked(renderer, trajectories[i], placeholder, limit)
            left_out += dropped
            if encoded is not None:
                asked[i] = encoded
        with frozen(model):
            logprobs = compute_logprobs(model, list(asked.values()), token_budget)
        for (i, encoded), own in zip(asked.items(), logprobs, strict=True):
            count, means = len(found[i]), _means(encoded.loss_turns, own.double().tolist())
            gains = defaultdict(list)
            for t in (turn - count for turn in means if turn >= count):
                gains[trajectories[i].parent(t)].append(means[t] - means[count + t])
            for t, each in gains.items():
                found[i][t] = sum(each) / len(each)
    if left_out:
        _logger.warning(
            "%d turns would end beyond the model's context of %s tokens; the gain of the replies before them is not "
            "known.",
            left_out,
            limit,
        )
    return found


def _asked(
    renderer: Renderer, one: Trajectory, placeholder: str, limit: int | None
) -> tuple[Encoded | None, int]:
    """Return an episode beside its contexts with the placeholder, None if none fits, and the number that do not fit."""
    seen = _within(renderer, one, limit)
    masked = masked_turns(renderer, one, placeholder)
    fits = {t: each for t, each in masked.items() if limit is None or each.longest <= limit}
    fits = {t: each for t, each in fits.items() if seen is not None and t in seen.loss_turns}
    encoded = _beside(seen, fits, len(one.turns)) if seen is not None and fits else None
    return encoded, len(masked) - len(fits)


def _check_placeholder(renderer: Renderer, placeholder: str) -> None:
    """Reject a placeholder with control tokens, which could end its message or start a new message."""
    tokenizer = renderer.tokenizer
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    held = control & set(tokenizer(placeholder, add_special_tokens=False)["input_ids"])
    check_fit(not held, "credit.placeholder", "be text without control tokens", placeholder)


def masked_turns(renderer: Renderer, trajectory: Trajectory, placeholder: str) -> dict[int, Encoded]:
    """Encode each turn that follows a reply, with a placeholder in the place of the reply.

    Args:
        renderer: Renderer of conversations to tokens.
        trajectory: The episode.
        placeholder: Text that replaces each message of the reply.

    Returns:
        Index of the turn -> one sequence that ends with the turn, in which only the turn carries loss.
    """
    answered = [
        t for t, turn in enumerate(trajectory.turns) if trajectory.parent(t) != OPENS and turn.observation
    ]
    if not trajectory.is_one_sequence:
        return {t: _alone(renderer, trajectory, t, placeholder) for t in answered}
    try:
        return _along(renderer, trajectory, answered, placeholder, whole=False)
    except ModelError:
        return _along(renderer, trajectory, answered, placeholder, whole=True)


def _along(
    renderer: Renderer, trajectory: Trajectory, answered: Container[int], placeholder: str, whole: bool
) -> dict[int, Encoded]:
    """Encode the masked turns of an episode that is one sequence, tokenizing the episode once."""
    walk, ids, found = renderer.walk(trajectory, whole), list[int](), dict[int, Encoded]()
    for t, turn in enumerate(trajectory.turns):
        if t in answered:
            other = walk.fork()
            heard = (*ids, *other.hear(_masked(turn, placeholder).observation).ids)
            said = other.say(turn.action).ids
            found[t] = Encoded(
                heard + said,
                (NO_TURN,) * len(heard) + (t,) * len(said),
                ("assistant",) * (len(heard) + len(said)),
            )
        ids += (*walk.hear(turn.observation).ids, *walk.say(turn.action).ids)
    walk.confirm()
    return found


def _alone(renderer: Renderer, trajectory: Trajectory, t: int, placeholder: str) -> Encoded:
    """Encode one masked turn of an episode that is not one sequence, with the context of this turn."""
    masked = (*trajectory.turns[:t], _masked(trajectory.turns[t], placeholder))
    seen = context_of(replace(trajectory, turns=masked), t)
    found = renderer.encode(seen, every_turn=True)
    return replace(found, turn=tuple(t if turn == len(seen.turns) - 1 else NO_TURN for turn in found.turn))


def _masked(turn: Turn, placeholder: str) -> Turn:
    """Return the turn with the placeholder as content of each message of its observation."""
    return replace(
        turn, observation=tuple({**message, "content": placeholder} for message in turn.observation)
    )


def _within(renderer: Renderer, trajectory: Trajectory, limit: int | None) -> Encoded | None:
    """Encode an episode without the turns that exceed the limit of tokens; None if no turn fits.

    Raises:
        DataError: If a turn cannot be encoded as tokens.
    """
    whole = renderer.encode(trajectory, every_turn=True)
    if limit is None or whole.longest <= limit:
        return whole
    try:
        return renderer.encode(trajectory, limit, every_turn=True)
    except DataError:
        return None


def _beside(seen: Encoded, masked: dict[int, Encoded], count: int) -> Encoded:
    """Join an episode and its masked turns into the sequences of one example; masked turn t has index count + t."""
    lengths = [part.stop - part.start for part in seen.sequences] + [len(one.ids) for one in masked.values()]
    turn = list(seen.turn)
    for one in masked.values():
        turn += [NO_TURN if t == NO_TURN else count + t for t in one.turn]
    return Encoded(
        ids=tuple(chain(seen.ids, *(one.ids for one in masked.values()))),
        turn=tuple(turn),
        role=("assistant",) * sum(lengths),
        starts=tuple(accumulate(lengths[:-1], initial=0)),
    )


def _means(turns: Sequence[int], logprobs: Sequence[float]) -> dict[int, float]:
    """Return the mean log-probability of the tokens of each turn, in nats, by turn index."""
    of_turn: dict[int, list[float]] = defaultdict(list)
    for turn, each in zip(turns, logprobs, strict=True):
        of_turn[turn].append(each)
    return {turn: sum(each) / len(each) for turn, each in of_turn.items()}


def feedback_of(trajectories: Sequence[Trajectory], placeholder: str, reader: Reader) -> list[list[float]]:
    """Return `feedback_gains` under a loaded policy, in nats `[trajectories][turns]`; NaN: not known."""
    with frozen(reader.model, reader.precision):
        return feedback_gains(reader.model, reader.renderer, trajectories, placeholder, reader.token_budget)


class FeedbackGain(Quantity):
    """Log-likelihood gain of an action from seeing the environment's reply to the previous action.

    The credit gets it as argument `feedback`: the mean over the tokens of the next turn, in nats
    `[trajectories][turns]`; NaN if no turn follows or there is no reply.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "passes of the policy that acted over the episodes, and over each turn once more",
        passes=1,
        policies=frozenset({ACTED}),
    )
    request: ClassVar[type[Need]] = Feedback

    def compute(self, request: Feedback, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the gains under the policy that acted."""
        return Computed(feedback_of(episodes, request.placeholder, source.policy(ACTED)))

    def exact(self, request: Feedback, ground: Ground) -> list[list[float]]:
        """Return the exact gain of each turn's reply, in nats `[episodes][turns]`; NaN at the last turn.

        A policy without the reply does not know its state, so it acts as in a state drawn uniformly at random.
        """
        process = ground.episodes.process
        blind: dict[str, float] = {}
        for state, actions in process.actions.items():
            for name, chance in zip(actions, process.policy(state), strict=True):
                blind[name] = blind.get(name, 0.0) + chance / len(process.actions)

        def gain(step: Step) -> float:
            name = list(process.actions[step.state])[step.action]
            return log(process.policy(step.state)[step.action] / blind[name])

        return [[*(gain(step) for step in steps[1:]), nan] for steps in ground.episodes.steps]
