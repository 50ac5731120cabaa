"""Split a batch of another trainer into turns, weigh them with a credit, and write the weights to the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, isfinite
from typing import Any

import torch
from torch import Tensor

from perturn.adapters.host_credits import HostCredit
from perturn.errors import DataError, check_fit
from perturn.group import groups_of
from perturn.types import Action, Task, Trajectory, Turn

Span = tuple[int, int]
"""Token range of a turn: index of its first token, and index after its last token."""
_NO_TURN: list[Span] = [(0, 0)]
"""Token ranges of a sequence without a trained token."""


@dataclass(frozen=True)
class HostEpisode:
    """An episode of a host, as rewards and states of its turns."""

    group: str
    """Name of the group; a credit compares the episodes of a group."""
    rewards: Sequence[float]
    """Reward of each turn [turns]."""
    states: Sequence[Any] | None = None
    """Key of the state before each turn, equal for equal states [turns]; None: unknown."""
    earned: Sequence[float] | None = None
    """Part of the episode's score that each turn earned [turns]; None: unknown. Hosts assign the whole score to the
    last turn. These parts are moved from there to their turns, so the sum of rewards does not change."""

    def trajectory(self, sample: int) -> Trajectory:
        """Return the episode as a trajectory for a credit; an episode with a total reward above 0 counts as solved.

        Args:
            sample: Number of the episode in its group.

        Raises:
            DataError: If the number of states or of earned rewards differs from the number of turns, or a reward is not
                finite.
        """
        turns = len(self.rewards)
        states = self._one_a_turn(self.states, None, "state")
        earned = self._one_a_turn(self.earned, 0.0, "reward")
        rewards = [own + part for own, part in zip(self.rewards, earned, strict=True)]
        rewards[turns - 1 :] = [reward - fsum(earned) for reward in rewards[turns - 1 :]]
        action, total = Action("", token_ids=(0,), logprobs=(0.0,)), fsum(rewards)
        return Trajectory(
            Task(self.group),
            tuple(
                Turn((), action, reward, state_key=None if state is None else str(state))
                for reward, state in zip(rewards, states, strict=True)
            ),
            total_reward=total,
            success=total > 0,
            terminated=True,
            sample=sample,
        )

    def _one_a_turn(self, given: Sequence[Any] | None, empty: Any, what: str) -> Sequence[Any]:
        turns = len(self.rewards)
        if given is None:
            return [empty] * turns
        if len(given) != turns:
            raise DataError(
                f"group {self.group!r:.80}: expected a {what} for each of the {turns} turns of an episode, which are "
                f"the runs of tokens that the policy wrote, got {len(given)}."
            )
        return given


def turn_spans(mask: Sequence[float]) -> list[Span]:
    """Return the token ranges of the turns of a sequence: the runs of ones in its mask [tokens].

    A mask without ones gives one empty turn, so that the sequence's reward still counts in its group. Hosts mask whole
    sequences that they cut, for example. What was recorded for the turns of such a sequence is not read.
    """
    spans: list[Span] = []
    start: int | None = None
    for at, trained in enumerate([*map(bool, mask), False]):
        if trained and start is None:
            start = at
        elif not trained and start is not None:
            spans.append((start, at))
            start = None
    return spans or list(_NO_TURN)


def turn_rewards(token_rewards: Sequence[float], spans: Sequence[Span]) -> list[float]:
    """Return the reward of each turn [turns]: the sum over its tokens and the tokens up to the next turn.

    Rewards before the first turn are added to the first turn, so that the total does not change.

    Args:
        token_rewards: Reward of each token [tokens].
        spans: Token ranges of the turns.
    """
    starts = [0, *(start for start, _ in spans[1:]), len(token_rewards)]
    return [fsum(token_rewards[start:end]) for start, end in pairwise(starts)]


def weigh_episodes(
    episodes: Sequence[HostEpisode], weigher: HostCredit, needed: Mapping[str, Sequence[Any]] | None = None
) -> list[list[float]]:
    """Return the weight that a credit gives each turn of each episode `[episodes][turns]`.

    Args:
        episodes: Episodes of a batch, in any order.
        weigher: The credit.
        needed: Keyword of a quantity that the credit needs -> one entry per episode.

    Raises:
        DataError: If the credit compares turns by state keys, and an episode lacks the key of a turn.
        ConfigError: If the credit does not return one finite number per turn.
    """
    credit = weigher.credit
    if weigher.reads_states and (lacks := [one.group for one in episodes if one.states is None]):
        raise DataError(
            f"credit {type(credit).__name__} compares turns by state keys, and {len(lacks)} of {len(episodes)} "
            f"episodes of {weigher.host} have none, such as one of group {lacks[0]!r:.80}; record "
            "the key of the state before each turn, also before the first turn."
        )
    samples: dict[str, int] = {}
    made = []
    for episode in episodes:
        samples[episode.group] = samples.get(episode.group, -1) + 1
        made.append(episode.trajectory(samples[episode.group]))
    compared: list[Sequence[int]] = [group.indices for group in groups_of(made)]
    if credit.traits.across_tasks:
        compared = [[index for members in compared for index in members]]
    found: list[list[float]] = [[] for _ in episodes]
    for members in compared:
        given = {name: [entries[index] for index in members] for name, entries in (needed or {}).items()}
        for index, weights in zip(members, credit([made[i] for i in members], **given), strict=True):
            found[index] = weights.tolist()
            turns, got = len(made[index].turns), found[index]
            fits, must = len(got) == turns, f"return a finite number for each of {turns} turns"
            check_fit(fits and all(map(isfinite, got)), f"credit {type(credit).__name__}", must, got)
    return found


@dataclass(frozen=True)
class HostBatch:
    """A batch of token sequences of a host. An episode may have several sequences."""

    mask: Tensor
    """1 at tokens that the policy wrote, else 0 [sequences, tokens]. Each run of ones is a turn."""
    rewards: Tensor
    """Reward of each token [sequences, tokens]."""
    groups: Sequence[Any]
    """Name of each sequence's group [sequences]."""
    episodes: Sequence[Any] | None = None
    """Name of each sequence's episode [sequences]; None: each sequence is an episode."""
    states: Sequence[Sequence[Any] | None] | None = None
    """Key of the state before each turn `[sequences][turns]`; None: unknown."""
    earned: Sequence[Sequence[float] | None] | None = None
    """Part of the episode's score that each turn earned `[sequences][turns]`; None: unknown."""
    values: Tensor | None = None
    """Value V before each token [sequences, tokens]; only V before the first token of a turn is read. None: unknown."""
    positions: Sequence[int] | None = None
    """Position of each sequence in its episode, in the order of play [sequences]; None: sequences are in this order."""


def weigh_batch(batch: HostBatch, credit: HostCredit) -> tuple[Tensor, Tensor]:
    """Return the advantage of each token and the target for V, both [sequences, tokens].

    All tokens of a turn have the same two numbers; other tokens have 0. The target is the advantage plus V. If the
    batch has no V, the target equals the advantage, as in the hosts.
    """
    spans = [turn_spans(row) for row in batch.mask.tolist()]
    rewards = [turn_rewards(row, own) for row, own in zip(batch.rewards.tolist(), spans, strict=True)]
    rows: dict[Any, list[int]] = {}
    for row, name in enumerate(batch.episodes if batch.episodes is not None else range(len(spans))):
        rows.setdefault(name, []).append(row)
    if batch.positions is not None:
        for own in rows.values():
            own.sort(key=batch.positions.__getitem__)
    episodes = [
        HostEpisode(
            str(batch.groups[own[0]]),
            _joined(rewards, own),
            _told(batch.states, spans, own, None),
            _told(batch.earned, spans, own, 0.0),
        )
        for own in rows.values()
    ]
    before: list[list[float]] = [[0.0] * len(own) for own in spans]
    needed = {}
    if batch.values is not None:
        before = [
            [row[start] for start, _ in own] for row, own in zip(batch.values.tolist(), spans, strict=True)
        ]
        needed["values"] = [[[value] for value in _joined(before, own)] for own in rows.values()]
    numbers: list[list[float]] = [[] for _ in spans]
    for own, found in zip(rows.values(), weigh_episodes(episodes, credit, needed), strict=True):
        left = iter(found)
        for row in own:
            numbers[row] = [next(left) for _ in spans[row]]
    targets = [[a + v for a, v in zip(*both, strict=True)] for both in zip(numbers, before, strict=True)]
    return on_tokens(numbers, spans, batch.rewards), on_tokens(targets, spans, batch.rewards)


def _joined(by_row: Sequence[Sequence[Any]], rows: Sequence[int]) -> list[Any]:
    return [entry for row in rows for entry in by_row[row]]


def _told(
    given: Sequence[Sequence[Any] | None] | None,
    spans: Sequence[Sequence[Span]],
    rows: Sequence[int],
    empty: Any,
) -> list[Any] | None:
    """Return an entry for each turn of an episode, from its sequences; None if no sequence has entries.

    Surplus entries of the last sequence are treated as in `fitted_states` and `fitted_rewards`.

    Args:
        given: Entries of each sequence, or None `[sequences][turns]`.
        spans: Token ranges of the turns `[sequences][turns]`.
        rows: Indices of the episode's sequences.
        empty: Entry for the turns of a sequence without entries: None for states, 0 for rewards.
    """
    if given is None or all(given[row] is None for row in rows):
        return None
    found: list[Any] = []
    for row in rows:
        told = given[row]
        if told is None or (not told and spans[row] != _NO_TURN):
            found += [empty] * len(spans[row])
        elif row != rows[-1] and spans[row] != _NO_TURN:
            found += told
        else:
            found += (
                fitted_states(told, spans[row], row) if empty is None else fitted_rewards(told, spans[row])
            )
    return found


def fitted_states(states: Sequence[Any], spans: Sequence[Span], row: int) -> list[Any]:
    """Return a state key for each turn of a sequence; surplus keys at the end are left out.

    Args:
        states: Key of the state before each turn that was played, and possibly of the state at the end.
        spans: Token ranges of the turns.
        row: Number of the sequence. If no token is trained, the number is in its key, so that no other key is equal.
    """
    return [f"sequence {row} without a turn"] if spans == _NO_TURN else list(states[: len(spans)])


def fitted_rewards(rewards: Sequence[float], spans: Sequence[Span]) -> list[float]:
    """Return a reward for each turn of a sequence; the last turn also has the surplus rewards at the end.

    If no token is trained, the recorded rewards are not read.
    """
    if spans == _NO_TURN:
        return [0.0]
    last = len(spans) - 1
    return [*rewards[:last], fsum(rewards[last:])] if len(rewards) > last else list(rewards)


def on_tokens(weights: Sequence[Sequence[float]], spans: Sequence[Sequence[Span]], like: Tensor) -> Tensor:
    """Return a tensor with each turn's weight at all its tokens, and 0 at other tokens [sequences, tokens].

    Args:
        weights: Weight of each turn `[sequences][turns]`.
        spans: Token ranges of the turns `[sequences][turns]`.
        like: Tensor with the shape, dtype and device of the result [sequences, tokens].
    """
    found = torch.zeros_like(like)
    for row, of_one, turns in zip(found, weights, spans, strict=True):
        for (start, end), weight in zip(turns, of_one, strict=True):
            row[start:end] = weight
    return found
