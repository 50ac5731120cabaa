"""Adapter for verl 0.9: one advantage per turn, by a registered estimator or a mixin for the trainer.

`register` adds an advantage estimator, to which verl passes masks, rewards and groups. `PerTurnAdvantages` is a mixin
for a trainer of `verl.trainer.ppo.v1`. The mixin also reads two lists that the agent loop may record in the
`extra_fields` of each output:

- `state_keys`: a key of the state before each turn.
- `turn_rewards`: the part of the session's score that each turn earned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from perturn.adapters.host_batches import HostBatch, weigh_batch
from perturn.adapters.host_credits import STATES, HostCredit, host_credit
from perturn.credit import Credit
from perturn.needs import Values, reads

if TYPE_CHECKING:

    class _Trainer:
        def __init__(self, config: Any) -> None: ...
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any: ...

else:
    _Trainer = object

VERSIONS = ">=0.9,<0.10"

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
    """Further fields of `HostBatch`, which `PerTurnAdvantages` sets in each step."""

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
        last = {session: row for row, session in enumerate(sessions)}
        rewards = (
            token_level_rewards.clone()
        )  # verl repeats a session's score in each of its outputs, and it counts only once
        rewards[[row for row, session in enumerate(sessions) if last[session] != row]] = 0
        return weigh_batch(HostBatch(response_mask, rewards, index, **self.beside), self.credit)


def register(credit: str | Mapping[str, Any] | Credit, name: str = "perturn") -> Estimator:
    """Register an advantage estimator in verl, which `algorithm.adv_estimator=NAME` then selects.

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
        self._estimator.beside = {
            "episodes": [key.rsplit("_", 1)[0] for key in batch.keys],  # a key is uid_session_output
            "states": [record.get("state_keys") for record in records],
            "earned": [record.get("turn_rewards") for record in records],
            "values": data.to_padded_tensor()[Values.name] if needs_values else None,
        }
        return super()._compute_advantage(batch, metrics)
