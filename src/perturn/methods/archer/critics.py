"""Quantity `critics`: linear heads Q and V on hidden states, trained by temporal differences across iterations.

Q of a turn is computed at the last token of its action, so it depends on the action and not on the reply. V is computed
at the last token of the turn's prompt. The hidden states come from a policy that never changes, so a head stays valid
from one iteration to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from perturn.extend import Need, RunError, Trajectory
from perturn.extend.quantity_tools import (
    START,
    Computed,
    Ground,
    Quantity,
    QuantityTraits,
    Reader,
    Source,
    State,
    action_features,
    encoded,
    explained_variance,
    frozen,
    in_order,
    turn_features,
)
from perturn.extend.tensors import Return, returns_to_go
from perturn.methods.archer.archer_credit import Critics as Request
from perturn.methods.archer.archer_credit import Critique

CRITICS = 2
"""Number of critics. Each critic is trained on its own bootstrap sample of the episodes of an iteration."""

_CONSTANT = 1e-6
"""Standard deviation, relative to the root mean square over all features, below which a feature counts as constant."""


@dataclass(frozen=True)
class Critics:
    """Heads of all critics, float64. A head has one weight per standardized feature, and a constant at the end."""

    q: Tensor
    """Q heads [critics, features + 1]."""
    v: Tensor
    """V heads [critics, features + 1]."""
    slow_q: Tensor
    """Target Q heads, which follow `q` slowly [critics, features + 1]."""
    slow_v: Tensor
    """Target V heads, which follow `v` slowly [critics, features + 1]."""
    center_q: Tensor
    """Mean of each feature after actions, over the first iteration [features]."""
    scale_q: Tensor
    """Inverse of the standard deviation of each feature after actions, over the first iteration [features]."""
    center_v: Tensor
    """Mean of each feature before actions, over the first iteration [features]."""
    scale_v: Tensor
    """Inverse of the standard deviation of each feature before actions, over the first iteration [features]."""
    iterations: Tensor
    """Number of iterations that trained the critics, int64 []."""


@dataclass(frozen=True)
class Rows:
    """Training data of critics: at least one episode, each with at least one turn."""

    behind: Sequence[Tensor]
    """Hidden states at the last token of each action, one tensor per episode [turns, features]."""
    before: Sequence[Tensor]
    """Hidden states at the last token of each turn's prompt, one tensor per episode [turns, features]."""
    rewards: Sequence[Sequence[float]]
    """Reward of each turn, in units of reward `[episodes][turns]`."""


@dataclass(frozen=True)
class Learned:
    """Critics after an iteration, with their Q and V of the episodes of this iteration."""

    critiques: Sequence[Critique]
    """Q and V of each episode."""
    critics: Critics | None
    """Trained critics; None if there was no episode to train on."""
    explained_variance: float | None
    """Share of the variance of returns that V explains, over turns that are not in a critic's bootstrap sample. See
    `perturn.policy.value_heads.explained_variance`."""
    td_error: float | None
    """Root mean square of r + gamma V' - Q over the same turns, in units of reward."""


def bootstrap(episodes: int, seed: int) -> Tensor:
    """Draw a bootstrap sample of the episodes for each critic.

    Returns:
        Number of times that each episode is in each sample, float64 [critics, episodes].
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(episodes, (CRITICS, episodes), generator=generator)
    return torch.stack([torch.bincount(own, minlength=episodes) for own in drawn]).double()


def begin(rows: Rows) -> Critics:
    """Return critics with weights of 0, which standardize features by the mean and deviation of these rows."""
    (center_q, scale_q), (center_v, scale_v) = (_standard(side) for side in (rows.behind, rows.before))
    q, v = (torch.zeros(CRITICS, len(scale) + 1, dtype=torch.float64) for scale in (scale_q, scale_v))
    return Critics(q, v, q, v, center_q, scale_q, center_v, scale_v, torch.tensor(0))


def _standard(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean and the inverse standard deviation of each feature, each [features].

    For a constant feature, the root mean square of all deviations replaces the deviation.
    """
    rows = torch.cat(list(features)).double()
    deviation = rows.std(0, correction=0)
    together = deviation.square().mean().sqrt()
    filled = torch.where(deviation > _CONSTANT * together, deviation, together)
    return rows.mean(0), torch.where(filled > 0, filled, 1.0).reciprocal()


def learn(critics: Critics, rows: Rows, counts: Tensor, learning: Request) -> Critics:
    """Train critics on the episodes of an iteration, and return them.

    In each round, every head is fitted to the target heads, and then the target heads move towards the heads:

        Q = argmin mean (Q - r - gamma V')^2 + penalty d |w - w_0|^2,   V' = 0 after the last turn of an episode
        V = argmin mean (V - Q')^2           + penalty d |w - w_0|^2

    w are the d weights on standardized features, and w_0 these weights before the iteration. The constant of a head has
    no penalty. Means are over the turns of all episodes. An episode that was drawn several times counts several times.

    Args:
        critics: Critics before the iteration.
        rows: Episodes of the iteration.
        counts: Number of times that each episode is in a critic's sample; no sample is empty [critics, episodes].
        learning: Settings of the training.
    """
    found = [_learn_one(critics, k, rows, own, learning) for k, own in enumerate(counts)]
    names = ("q", "v", "slow_q", "slow_v")
    heads = {name: torch.stack(each) for name, each in zip(names, zip(*found, strict=True), strict=True)}
    return replace(critics, **heads, iterations=critics.iterations + 1)


def _learn_one(
    critics: Critics, k: int, rows: Rows, counts: Tensor, learning: Request
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train one critic, and return its heads q and v and its target heads, each [features + 1]."""
    lengths = torch.tensor([len(own) for own in rows.rewards])
    share = counts.repeat_interleave(lengths)
    share = (share / share.sum())[:, None]
    q_rows, v_rows = torch.cat(behind(critics, rows)), torch.cat(before(critics, rows))
    following = torch.cat([_following(own) for own in before(critics, rows)])
    rewards = torch.tensor([each for own in rows.rewards for each in own], dtype=torch.float64)
    fit_q = _Ridge(q_rows, share, learning.penalty)
    fit_v = _Ridge(v_rows, share, learning.penalty)
    earned, pulled = fit_q(rewards[:, None], critics.q[k])[:, 0], fit_v(0 * q_rows[:, :1], critics.v[k])[:, 0]
    ahead, across = learning.gamma * fit_q(following), fit_v(q_rows)
    q, v, slow_q, slow_v = (each[k] for each in (critics.q, critics.v, critics.slow_q, critics.slow_v))
    for _ in range(learning.rounds):
        q, v = earned + ahead @ slow_v, pulled + across @ slow_q
        slow_q, slow_v = slow_q.lerp(q, learning.tau), slow_v.lerp(v, learning.tau)
    return q, v, slow_q, slow_v


class _Ridge:
    """Ridge regression on weighted rows, whose matrix is factored once for many targets."""

    def __init__(self, rows: Tensor, share: Tensor, penalty: float) -> None:
        self._weighed = rows * share
        self._pull = torch.full(rows.shape[1:], penalty * max(1, rows.shape[1] - 1), dtype=torch.float64)
        self._pull[-1] = 0
        self._factor = torch.linalg.cholesky(rows.T @ self._weighed + torch.diag(self._pull))

    def __call__(self, targets: Tensor, pulled_to: Tensor | None = None) -> Tensor:
        """Fit one head per target.

        Args:
            targets: Targets of the regressions [rows, targets].
            pulled_to: Head towards which the penalty pulls [features + 1]; None: 0.

        Returns:
            Fitted heads [features + 1, targets].
        """
        aim = self._weighed.T @ targets
        if pulled_to is not None:
            aim = aim + (self._pull * pulled_to)[:, None]
        return torch.cholesky_solve(aim, self._factor)


def behind(critics: Critics, rows: Rows) -> list[Tensor]:
    """Return the standardized features after each action, with a 1 appended, per episode [turns, features + 1]."""
    return [_scaled(own, critics.center_q, critics.scale_q) for own in rows.behind]


def before(critics: Critics, rows: Rows) -> list[Tensor]:
    """Return the standardized features before each action, with a 1 appended, per episode [turns, features + 1]."""
    return [_scaled(own, critics.center_v, critics.scale_v) for own in rows.before]


def _scaled(features: Tensor, center: Tensor, scale: Tensor) -> Tensor:
    rows = (features.double() - center) * scale
    return torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)


def _following(rows: Tensor) -> Tensor:
    """Return the row of the next turn for each turn; zeros after the last turn, where every head predicts 0."""
    return torch.cat([rows[1:], torch.zeros_like(rows[:1])])


def judge(critics: Critics, rows: Rows) -> list[Critique]:
    """Return Q and V of the turns of each episode, from each critic, in units of reward."""
    return [
        Critique((critics.q @ own.T).tolist(), (critics.v @ first.T).tolist())
        for own, first in zip(behind(critics, rows), before(critics, rows), strict=True)
    ]


def learn_and_judge(
    critics: Critics | None, rows: Rows, returns: Sequence[Sequence[float]], learning: Request, seed: int
) -> Learned:
    """Train critics on the episodes of an iteration, and compute Q and V of these episodes.

    Args:
        critics: Critics of the previous iteration; None: start with weights of 0.
        rows: Episodes of the iteration.
        returns: Discounted return from each turn on, in units of reward `[episodes][turns]`.
        learning: Settings of the training.
        seed: Seed of the bootstrap samples; the number of earlier iterations is added to it.
    """
    known = critics or begin(rows)
    counts = bootstrap(len(rows.rewards), seed + int(known.iterations))
    after = learn(known, rows, counts, learning)
    critiques = judge(after, rows)
    values, aims, errors = [], [], []
    for k, i in (counts == 0).nonzero().tolist():  # not in the critic's sample
        values.append([[value] for value in critiques[i].v[k]])
        aims.append([[each] for each in returns[i]])
        errors += _td_errors(after, rows, k, i, learning.gamma)
    error = torch.tensor(errors, dtype=torch.float64).square().mean().sqrt() if errors else None
    return Learned(
        critiques, after, explained_variance(values, aims), None if error is None else float(error)
    )


def _td_errors(critics: Critics, rows: Rows, k: int, i: int, gamma: float) -> list[float]:
    """Return the TD error r + gamma V' - Q of each turn of episode `i` under critic `k`, in units of reward."""
    own = Rows(rows.behind[i : i + 1], rows.before[i : i + 1], rows.rewards[i : i + 1])
    after = _following(before(critics, own)[0]) @ critics.slow_v[k]
    rewards = torch.tensor(own.rewards[0], dtype=torch.float64)
    errors: list[float] = (rewards + gamma * after - behind(critics, own)[0] @ critics.q[k]).tolist()
    return errors


def critics_of(
    trajectories: Sequence[Trajectory],
    request: Request,
    reader: Reader,
    before: Critics | None = None,
    seed: int = 0,
) -> Learned:
    """Train critics on the episodes of an iteration, and return Q and V of each turn of these episodes.

    Args:
        trajectories: Episodes of an iteration; their order does not matter. An episode without turns has no values.
        request: Settings of the critics, and the rewards to count.
        reader: Loaded policy whose hidden states the critics read; the same policy in all iterations.
        before: Critics of the previous iteration; None: start with weights of 0.
        seed: Seed of the bootstrap samples.
    """
    encoded_rows = encoded(trajectories, reader.renderer)
    order = in_order(encoded_rows, trajectories)
    sequences = [encoded_rows[i].chosen for i in order]
    if not order:
        return Learned([Critique([[]], [[]]) for _ in trajectories], before, None, None)
    rewards = (request.returns or Return())([trajectories[i] for i in order])
    with frozen(reader.model, reader.precision):
        first = turn_features(
            reader.model, sequences, [[1] * len(own) for own in rewards], reader.token_budget
        )
        rows = Rows(action_features(reader.model, sequences, reader.token_budget), first, rewards)
    returns = [returns_to_go(own, request.gamma) for own in rewards]
    learned = learn_and_judge(before, rows, returns, request, seed)
    found = dict(zip(order, learned.critiques, strict=True))
    return replace(learned, critiques=[found.get(i, Critique([[]], [[]])) for i in range(len(trajectories))])


def _critics(state: State) -> Critics:
    """Return critics from their stored tensors.

    Raises:
        RunError: If the names of the tensors are wrong.
    """
    try:
        return Critics(**state)
    except TypeError as error:
        raise RunError(f"the kept critics are none: {error}; restore their file from a copy.") from error


class TurnCritics(Quantity):
    """Q and V of each turn, from critics that every iteration trains further.

    The credit gets them as argument `critics`: one `perturn.methods.archer.archer_credit.Critique` per trajectory, in
    units of reward.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass over the episodes of the policy that the loop begins with, and many regressions",
        passes=2,  # one for Q, one for V
        policies=frozenset({START}),
        carries=True,
    )
    request: ClassVar[type[Need]] = Request

    def compute(self, request: Request, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Train the critics on the episodes, with hidden states of the loop's initial policy, and compute Q and V."""
        state = source.states.get(request.name)
        before = None if state is None else _critics(state)
        found = critics_of(episodes, request, source.policy(START), before, source.seed(request.name))
        now = found.critics
        return Computed(
            found.critiques,
            None if now is None else {each.name: getattr(now, each.name) for each in fields(now)},
            {"explained_variance": found.explained_variance, "td_error": found.td_error},
        )

    def exact(self, request: Request, ground: Ground) -> list[Critique]:
        """Return the exact Q and V of each turn of each episode, as one critic."""
        every, gamma = ground.episodes, ground.gamma
        return [
            Critique(
                [[every.action_value(step, t, gamma) for t, step in enumerate(steps)]],
                [[every.value(step.state, t, gamma) for t, step in enumerate(steps)]],
            )
            for steps in every.steps
        ]
