"""Adapter for verl 0.9: one advantage per turn, by a registered estimator or a mixin for the trainer.

`register` adds an advantage estimator, to which verl passes masks, rewards and groups. `PerTurnAdvantages` is a mixin
for a trainer of `verl.trainer.ppo.v1`. The mixin also reads two lists that the agent loop may record in the
`extra_fields` of each output:

- `state_keys`: a key of the state before each turn.
- `turn_rewards`: the part of the session's score that each turn earned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from perturn.adapters.host_batches import HostBatch, weigh_batch
from perturn.adapters.host_credits import STATES, HostCredit, host_credit
from perturn.credit import Credit
from perturn.errors import check_fit
from perturn.needs import Values, reads

if TYPE_CHECKING:

    class _Trainer:
        config: Any

        def __init__(self, config: Any) -> None: ...
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any: ...

else:
    _Trainer = object

VERSIONS = ">=0.9,<0.10"
_PADDING = re.compile("pad[0-9a-f]{32}")
"""Pattern of the group of sequences with which verl fills a batch up."""

_MIX = "mix perturn.adapters.verl.PerTurnAdvantages into the trainer, and"
GIVES: Mapping[str, str | None] = {
    STATES: f"{_MIX} put state_keys into extra_fields of the agent loop",
    Values.name: f"{_MIX} set critic.enable=True",
}
"""Input that verl does not pass to a registered estimator -> remedy for the error message."""


@dataclass
class Estimator:
    """An advantage estimator for verl's registry."""

    credit: HostCredit
    beside: dict[str, Any] = field(default_factory=dict)
    """Further fields of `HostBatch`, which `PerTurnAdvantages` sets in each step. Among them is `positions`, since verl
    sorts the sequences of a batch by their lengths."""

    def __call__(
        self, token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, both [sequences, tokens].

        Args:
            token_level_rewards: Reward of each token [sequences, tokens].
            response_mask: 1 at tokens that the policy wrote, else 0 [sequences, tokens].
            index: Name of each sequence's group [sequences].
        """
        sessions: Sequence[Any] = self.beside.get("episodes", range(len(index)))
        positions: Sequence[int] = self.beside.get("positions", [0] * len(index))
        last = {sessions[row]: row for row in sorted(range(len(index)), key=positions.__getitem__)}
        rewards = token_level_rewards.clone()
        # verl repeats a session's score in each of its outputs, and it counts only once
        rewards[[row for row, session in enumerate(sessions) if last[session] != row]] = 0
        played = [row for row, group in enumerate(index) if not _PADDING.fullmatch(str(group))]
        given = {name: each if each is None else _rows(each, played) for name, each in self.beside.items()}
        batch = HostBatch(response_mask[played], rewards[played], _rows(index, played), **given)
        whole = torch.zeros_like(rewards), torch.zeros_like(rewards)
        for into, numbers in zip(whole, weigh_batch(batch, self.credit), strict=True):
            into[played] = numbers
        return whole


def _rows(given: Any, rows: Sequence[int]) -> Any:
    """Return the entries of some sequences."""
    return given[rows] if isinstance(given, Tensor) else [given[row] for row in rows]


def register(credit: str | Mapping[str, Any] | Credit, name: str = "perturn") -> Estimator:
    """Register an advantage estimator in verl, which `algorithm.adv_estimator=NAME` then selects.

    The estimator takes each output of an agent loop as an episode. If sessions have several outputs, use
    `PerTurnAdvantages`.

    Args:
        credit: A credit, the name of a credit, or a section `credit`.
        name: Name of the estimator.

    Raises:
        ConfigError: If the credit needs other inputs than masks, rewards and groups.
    """
    return _add(Estimator(host_credit("verl", credit, GIVES)), name)


def _add(estimator: Estimator, name: str) -> Estimator:
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est(name)(estimator)
    return estimator


class PerTurnAdvantages(_Trainer):
    """Mixin for a trainer of verl: `credit` may also read state keys, and V of verl's critic."""

    credit: str | Mapping[str, Any] | Credit = "gigpo"
    """A credit, the name of a credit, or a section `credit`."""

    def __init__(self, config: Any) -> None:
        """Check that verl provides the credit's inputs, and register it as `algorithm.adv_estimator`."""
        gives = {STATES: None, Values.name: None if config.critic.enable else "set critic.enable=True"}
        estimator = Estimator(host_credit("verl", self.credit, gives))
        self._estimator = _add(estimator, config.algorithm.adv_estimator)
        super().__init__(config)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Set the estimator's further inputs, and compute advantages as verl does."""
        import transfer_queue as tq

        needs_values = reads(self._estimator.credit.credit.needs, Values)
        fields = ["extra_fields", *([Values.name] if needs_values else [])]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        records = data.pop("extra_fields").tolist()
        keys = [key.rsplit("_", 1) for key in batch.keys]  # uid_session_output
        alone = len({session for session, _ in keys}) == len(keys)
        must, remedy = "be false if sessions have several outputs", "Only the last output keeps its rewards."
        penalty = self.config.algorithm.use_kl_in_reward
        check_fit(alone or not penalty, "algorithm.use_kl_in_reward", must, penalty, remedy)
        self._estimator.beside = {
            "episodes": [session for session, _ in keys],
            "positions": [int(output) for _, output in keys],
            "states": [record.get("state_keys") for record in records],
            "earned": [record.get("turn_rewards") for record in records],
            "values": data.to_padded_tensor()[Values.name] if needs_values else None,
        }
        return super()._compute_advantage(batch, metrics)
