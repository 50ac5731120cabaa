"""Adapter for SkyRL 0.3: one advantage per turn, for whole and for step-wise trajectories.

`PerTurnAdvantages`, a mixin for SkyRL's trainer, finds the turns in `loss_mask`. SkyRL's registry of estimators is not
used: its estimators get `response_mask`, which includes observations, so turns cannot be separated. With step-wise
trajectories, the rewards of all steps count, while SkyRL's own estimators read only the last step's reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from perturn.adapters.host_batches import HostBatch, weigh_batch
from perturn.adapters.host_credits import STATES, host_credit
from perturn.credit import Credit
from perturn.needs import Values

if TYPE_CHECKING:

    class _Trainer:
        def __init__(self, cfg: Any, *args: Any, **settings: Any) -> None: ...
        def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any: ...
        def compute_advantages_and_returns(self, data: Any) -> Any: ...

else:
    _Trainer = object

VERSIONS = ">=0.3,<0.4"

_STATES = "state_keys"


class PerTurnAdvantages(_Trainer):
    """Mixin for a trainer of SkyRL: `credit` computes the advantages. Metrics are from SkyRL's own estimator."""

    credit: str | Mapping[str, Any] | Credit = "rloo"
    """A credit, the name of a credit, or a section `credit`."""

    def __init__(self, cfg: Any, *args: Any, **settings: Any) -> None:
        """Make the credit, and check that SkyRL provides its inputs."""
        own = type(self).state_keys is not PerTurnAdvantages.state_keys
        critic = cfg.trainer.critic.model.path is not None
        gives = {
            STATES: None if own else "override state_keys of perturn.adapters.skyrl.PerTurnAdvantages",
            Values.name: None if critic else "set trainer.critic.model.path",
        }
        self._credit = host_credit("SkyRL", self.credit, gives)
        super().__init__(cfg, *args, **settings)

    def state_keys(self, generator_output: Mapping[str, Any]) -> list[Sequence[Any] | None] | None:
        """Return a key of the state before each turn `[sequences][turns]`; the default has none.

        Override this method for credits that compare states.

        Args:
            generator_output: Output of the generator; `env_metrics` has what each environment reported.
        """
        return None

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        """Convert the generator's output as SkyRL does, and store the state keys in the batch's metadata."""
        batch = super().convert_to_training_input(generator_output, uids)
        batch.metadata[_STATES] = self.state_keys(generator_output)
        return batch

    @torch.no_grad()
    def compute_advantages_and_returns(self, data: Any) -> Any:
        """Compute advantages as SkyRL does, for its metrics, and replace them with the credit's advantages."""
        about = data.metadata
        played = len(about["uids"]) - about.get("pad_size", 0)  # the other sequences are padding of the batch
        last = about.get("is_last_step")
        values = data[Values.name]
        found = weigh_batch(
            HostBatch(
                data["loss_mask"][:played],
                data["rewards"][:played],
                about["uids"][:played],
                None if last is None else list(accumulate([0, *map(int, last[: played - 1])])),
                about.pop(_STATES),
                values=None if values is None else values[:played],
            ),
            self._credit,
        )
        data = super().compute_advantages_and_returns(data)
        for name, numbers in zip(("advantages", "returns"), found, strict=True):
            data[name] = torch.zeros_like(data[name])
            data[name][:played] = numbers
        return data
