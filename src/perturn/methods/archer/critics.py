"""Quantity `critics`: heads Q and V on hidden states, learned from one turn to the next, kept between iterations.

Q of a turn is read at the last token of its action, so it has seen the action and not yet the reply; V at the last
token of its prompt. The hidden states come from a policy that does not change, so that a head means in one iteration
what it meant in the one before.
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
"""Critics, each of which learns from a bootstrap sample of the episodes of an iteration."""

_CONSTANT = 1e-6
"""Relative deviation of a feature, against all features together, below which it counts as rounding."""


@dataclass(frozen=True)
class Critics:
    """Heads of all critics, float64. A head has a weight for each standardized feature, and a constant at the end."""

    q: Tensor
    """[critics, features + 1]."""
    v: Tensor
    """[critics, features + 1]."""
    slow_q: Tensor
    """The copy of `q` that follows it [critics, features + 1]."""
    slow_v: Tensor
    """The copy of `v` that follows it [critics, features + 1]."""
    center_q: Tensor
    """Mean of each feature after actions, in the first iteration [features]."""
    scale_q: Tensor
    """Multiplier of each feature less that mean [features]."""
    center_v: Tensor
    """Like `center_q`, for features before actions [features]."""
    scale_v: Tensor
    """Like `scale_q`, for features before actions [features]."""
    iterations: Tensor
    """How many the critics have learned from, int64 []."""


@dataclass(frozen=True)
class Rows:
    """Episodes as what critics learn from; at least one, each with a turn."""

    behind: Sequence[Tensor]
    """Hidden states at the last token of each action, one tensor per episode [turns, features]."""
    before: Sequence[Tensor]
    """Hidden states at the last token of the prompt of each turn, one tensor per episode [turns,
    features]."""
    rewards: Sequence[Sequence[float]]
    """Of each turn, in units of reward `[episodes][turns]`."""


@dataclass(frozen=True)
class Learned:
    """Critics after an iteration, and what they say of the episodes that they have learned from."""

    critiques: Sequence[Critique]
    """One an episode."""
    critics: Critics | None
    """The critics now; None if there was nothing to learn from."""
    explained_variance: float | None
    """See `perturn.policy.value_heads.explained_variance`: of returns by V, over the turns of episodes that a critic
    has not learned from."""
    td_error: float | None
    """Root of the mean square of r + gamma V' - Q over the same turns, in units of reward."""


def bootstrap(episodes: int, seed: int) -> Tensor:
    """Return how often each critic learns from each episode: as many draws with replacement as there are episodes.

    Returns:
        Counts, float64 [critics, episodes].
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(episodes, (CRITICS, episodes), generator=generator)
    return torch.stack([torch.bincount(own, minlength=episodes) for own in drawn]).double()


def begin(rows: Rows) -> Critics:
    """Return critics that say 0 of everything, with the mean and the deviation of these features."""
    (center_q, scale_q), (center_v, scale_v) = (_standard(side) for side in (rows.behind, rows.before))
    q, v = (torch.zeros(CRITICS, len(scale) + 1, dtype=torch.float64) for scale in (scale_q, scale_v))
    return Critics(q, v, q, v, center_q, scale_q, center_v, scale_v, torch.tensor(0))


def _standard(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean, and the inverse of the deviation; a constant feature gets the deviation of all features together."""
    rows = torch.cat(list(features)).double()
    deviation = rows.std(0, correction=0)
    together = deviation.square().mean().sqrt()
    filled = torch.where(deviation > _CONSTANT * together, deviation, together)
    return rows.mean(0), torch.where(filled > 0, filled, 1.0).reciprocal()


def learn(critics: Critics, rows: Rows, counts: Tensor, learning: Request) -> Critics:
    """Return critics after an iteration.

    In each round every head is fitted to what the copies said, and then the copies follow:

        Q = argmin mean (Q - r - gamma V')^2 + penalty d |w - w_0|^2,   V' = 0 after the last turn of an episode
        V = argmin mean (V - Q')^2           + penalty d |w - w_0|^2

    with w the d weights on standardized features, w_0 what they were, and a constant that is not pulled. Means are over
    the turns of all episodes, each as often as it was drawn.

    Args:
        critics: As they were.
        rows: Episodes.
        counts: How often a critic learns from each of them, at least once from one [critics, episodes].
        learning: Settings.
    """
    found = [_learn_one(critics, k, rows, own, learning) for k, own in enumerate(counts)]
    names = ("q", "v", "slow_q", "slow_v")
    heads = {name: torch.stack(each) for name, each in zip(names, zip(*found, strict=True), strict=True)}
    return replace(critics, **heads, iterations=critics.iterations + 1)


def _learn_one(
    critics: Critics, k: int, rows: Rows, counts: Tensor, learning: Request
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return one critic's heads and their copies after an iteration."""
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
    """Ridge regression on weighted rows, factored once."""

    def __init__(self, rows: Tensor, share: Tensor, penalty: float) -> None:
        self._weighed = rows * share
        self._pull = torch.full(rows.shape[1:], penalty * max(1, rows.shape[1] - 1), dtype=torch.float64)
        self._pull[-1] = 0
        self._factor = torch.linalg.cholesky(rows.T @ self._weighed + torch.diag(self._pull))

    def __call__(self, targets: Tensor, pulled_to: Tensor | None = None) -> Tensor:
        """Return heads for several targets [rows, targets], pulled to one head or to 0 [features + 1, targets]."""
        aim = self._weighed.T @ targets
        if pulled_to is not None:
            aim = aim + (self._pull * pulled_to)[:, None]
        return torch.cholesky_solve(aim, self._factor)


def behind(critics: Critics, rows: Rows) -> list[Tensor]:
    """Return standardized features after each action, and a 1 [turns, features + 1]."""
    return [_scaled(own, critics.center_q, critics.scale_q) for own in rows.behind]


def before(critics: Critics, rows: Rows) -> list[Tensor]:
    """Return standardized features before each action, and a 1 [turns, features + 1]."""
    return [_scaled(own, critics.center_v, critics.scale_v) for own in rows.before]


def _scaled(features: Tensor, center: Tensor, scale: Tensor) -> Tensor:
    rows = (features.double() - center) * scale
    return torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)


def _following(rows: Tensor) -> Tensor:
    """Return the row of the turn after each; after the last turn zeros, for which every head says 0."""
    return torch.cat([rows[1:], torch.zeros_like(rows[:1])])


def judge(critics: Critics, rows: Rows) -> list[Critique]:
    """Return Q and V of each episode by each critic."""
    return [
        Critique((critics.q @ own.T).tolist(), (critics.v @ first.T).tolist())
        for own, first in zip(behind(critics, rows), before(critics, rows), strict=True)
    ]


def learn_and_judge(
    critics: Critics | None, rows: Rows, returns: Sequence[Sequence[float]], learning: Request, seed: int
) -> Learned:
    """Let critics learn from an iteration's episodes, and ask them about these.

    Args:
        critics: As the iteration before left them; None: they begin.
        rows: The episodes.
        returns: What an episode earned from each turn on, discounted, in units of reward `[episodes][turns]`.
        learning: Settings.
        seed: Which episodes each critic learns from depends on it, and on how many iterations they have seen.
    """
    known = critics or begin(rows)
    counts = bootstrap(len(rows.rewards), seed + int(known.iterations))
    after = learn(known, rows, counts, learning)
    critiques = judge(after, rows)
    values, aims, errors = [], [], []
    for k, i in (counts == 0).nonzero().tolist():  # not learned from
        values.append([[value] for value in critiques[i].v[k]])
        aims.append([[each] for each in returns[i]])
        errors += _td_errors(after, rows, k, i, learning.gamma)
    error = torch.tensor(errors, dtype=torch.float64).square().mean().sqrt() if errors else None
    return Learned(
        critiques, after, explained_variance(values, aims), None if error is None else float(error)
    )


def _td_errors(critics: Critics, rows: Rows, k: int, i: int, gamma: float) -> list[float]:
    """Return TD errors r + gamma V' - Q of each turn of an episode by a critic, in units of reward."""
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
    """Return Q and V of each turn, by critics on a policy's hidden states that learn from these episodes first.

    Args:
        trajectories: The episodes of an iteration, in any order, which changes nothing; one without turns has none.
        request: How critics learn, and which rewards count.
        reader: The policy, the same in all iterations.
        before: The critics as the iteration before left them; None: they begin.
        seed: Of the episodes that each critic learns from.
    """
    encoded_rows = encoded(trajectories, reader.renderer)
    order = in_order(encoded_rows, trajectories)
    sequences = [encoded_rows[i].chosen for i in order]
    if not order:
        return Learned([Critique([[]], [[]]) for _ in trajectories], before, None, None)
    rewards = (request.returns or Return())([trajectories[i] for i in order])
    with frozen(reader.model):
        first = turn_features(
            reader.model, sequences, [[1] * len(own) for own in rewards], reader.token_budget
        )
        rows = Rows(action_features(reader.model, sequences, reader.token_budget), first, rewards)
    returns = [returns_to_go(own, request.gamma) for own in rewards]
    learned = learn_and_judge(before, rows, returns, request, seed)
    found = dict(zip(order, learned.critiques, strict=True))
    return replace(learned, critiques=[found.get(i, Critique([[]], [[]])) for i in range(len(trajectories))])


def _critics(state: State) -> Critics:
    """Return critics from what was kept of them.

    Raises:
        RunError: If it is of something else.
    """
    try:
        return Critics(**state)
    except TypeError as error:
        raise RunError(f"the kept critics are none: {error}; restore their file from a copy.") from error


class TurnCritics(Quantity):
    """Q and V of each turn, by critics that are trained further in every iteration.

    Given as `critics`, in units of reward, a `perturn.methods.archer.archer_credit.Critique` a trajectory.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass over the episodes of the policy that the loop begins with, and many regressions",
        passes=2,  # Q and V each have one
        policies=frozenset({START}),
        carries=True,
    )
    request: ClassVar[type[Need]] = Request

    def compute(self, request: Request, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Let the critics learn from the episodes, on the policy that the loop began with, and ask them."""
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
        """Return exact Q and V at each turn of each episode, by a critic that knows them."""
        every, gamma = ground.episodes, ground.gamma
        return [
            Critique(
                [[every.action_value(step, t, gamma) for t, step in enumerate(steps)]],
                [[every.value(step.state, t, gamma) for t, step in enumerate(steps)]],
            )
            for steps in every.steps
        ]
