"""Adapter for prime-rl 0.7 to 0.8 with verifiers 0.3 to 0.4: one advantage per turn.

prime-rl's configuration accepts only its own algorithms. So `install` replaces the credit of one of them. A turn is a
message that the policy wrote. The environment may record two lists in the `info` of a trace:

- `state_keys`: a key of the state before each turn.
- `turn_rewards`: the part of the reward that each turn earned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perturn.adapters.host_batches import (
    HostEpisode,
    Span,
    fitted_rewards,
    fitted_states,
    turn_spans,
    weigh_episodes,
)
from perturn.adapters.host_credits import STATES, HostCredit, host_credit
from perturn.credit import Credit
from perturn.errors import check_fit, check_known

if TYPE_CHECKING:

    class _Algorithm:
        def __init__(self, *args: Any, **settings: Any) -> None: ...

else:
    _Algorithm = object

VERSIONS = ">=0.7,<0.9"
TRACES = ">=0.3,<0.5"

_STATES, _REWARDS = "state_keys", "turn_rewards"
_COMPARES_OTHERWISE = ("hierarchical_grpo", "rae")
"""Algorithms of prime-rl that do not compare all traces of a group with each other."""


def weigh_traces(traces: Iterable[Any], credit: HostCredit) -> None:
    """Weigh the traces of a group, and write the advantage of each sampled token into their nodes.

    Args:
        traces: Traces of verifiers. As in prime-rl, traces with an error and traces that are not trained are skipped.
        credit: The credit.
    """
    trained = [
        one for one in traces if one.ok and one.agent.trainable and any(any(node.mask) for node in one.nodes)
    ]
    turns = [[node for node in one.nodes if any(node.mask)] for one in trained]
    spans = [[(0, len(node.mask)) for node in own] for own in turns]
    episodes = [_episode(*both, row) for row, both in enumerate(zip(trained, spans, strict=True))]
    for own, weights in zip(turns, weigh_episodes(episodes, credit), strict=True):
        for node, weight in zip(own, weights, strict=True):
            node.advantages = [weight] * sum(node.mask)


def weigh_rollouts(rollouts: Sequence[Any], credit: HostCredit) -> None:
    """Weigh the rollouts of a group, and assign them the advantage of each token, as in prime-rl 0.7 and 0.8.0."""
    spans = [[turn_spans(sample.mask) for sample in one.samples] for one in rollouts]
    episodes = [
        _episode(one, [span for turns in own for span in turns], row)
        for row, (one, own) in enumerate(zip(rollouts, spans, strict=True))
    ]
    for one, own, weights in zip(rollouts, spans, weigh_episodes(episodes, credit), strict=True):
        left, found = iter(weights), []
        for sample, turns in zip(one.samples, own, strict=True):
            tokens = [0.0] * len(sample.mask)
            for start, end in turns:
                tokens[start:end] = [next(left)] * (end - start)
            found += tokens
        one.assign_advantages(found)


def _episode(played: Any, spans: Sequence[Span], row: int) -> HostEpisode:
    """Return a trace or rollout as an episode; see `fitted_states` for surplus keys.

    Args:
        played: The trace or rollout.
        spans: Token ranges of its turns.
        row: Index of the trace or rollout.
    """
    states, earned = played.info.get(_STATES), played.info.get(_REWARDS)
    return HostEpisode(
        "group",
        [*[0.0] * (len(spans) - 1), played.reward],
        None if states is None else fitted_states(states, spans, row),
        None if earned is None else fitted_rewards(earned, spans),
    )


class PerTurnCredit(_Algorithm):
    """Mixin for an algorithm of prime-rl: `credit` computes the advantages of each group."""

    credit: str | Mapping[str, Any] | Credit = "rloo"
    """A credit, the name of a credit, or a section `credit`."""
    length_penalty: Any = None
    """Penalty that the algorithm's own credit would subtract from rewards."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make the credit, and check that prime-rl provides its inputs and asks for no penalty."""
        self._credit = host_credit("prime-rl", self.credit, {STATES: None})
        super().__init__(*args, **settings)
        must = "be left out, since the credit of prime-rl that reads it is replaced"
        check_fit(self.length_penalty is None, "orchestrator.algo.length_penalty", must, self.length_penalty)

    async def score_group(self, group: Sequence[Any]) -> None:
        """Compute the advantage of each turn of a group.

        Args:
            group: Episodes of verifiers (prime-rl 0.8.1), or rollouts (earlier versions).
        """
        import verifiers.v1 as vf

        if all(isinstance(one, vf.Episode) for one in group):
            weigh_traces([trace for one in group for trace in one.traces], self._credit)
        else:
            weigh_rollouts(group, self._credit)


def install(credit: str | Mapping[str, Any] | Credit, algorithm: str = "grpo") -> None:
    """Replace the credit of one of prime-rl's algorithms. Call it before the orchestrator starts.

    Args:
        credit: A credit, the name of a credit, or a section `credit`.
        algorithm: Value of `orchestrator.algo.type` that names the algorithm. Its loss must read advantages, and its
            own credit must compare all traces of a group.

    Raises:
        ConfigError: If the algorithm is not suitable, or prime-rl does not provide an input of the credit.
    """
    from prime_rl.orchestrator.algo import ALGORITHM_CLASSES

    host_credit("prime-rl", credit, {STATES: None})
    known = [
        name
        for name, each in ALGORITHM_CLASSES.items()
        if each.action_loss_type == "rl" and name not in _COMPARES_OTHERWISE
    ]
    check_known(algorithm, known, f"the credit of prime-rl's algorithm {algorithm!r} cannot be replaced")
    base = ALGORITHM_CLASSES[algorithm]
    ALGORITHM_CLASSES[algorithm] = type(f"PerTurn{base.__name__}", (PerTurnCredit, base), {"credit": credit})
