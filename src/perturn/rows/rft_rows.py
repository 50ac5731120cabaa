"""Row maker `rft`: the expert's episodes and the policy's successes (rejection-sampling fine-tuning)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.needs import Need
from perturn.rows.endings import divide, weighted


@dataclass(frozen=True)
class RftRows:
    """The expert's trajectories of SFT and the policy's successes, each with weight 1.

    Source: Yuan et al. 2023, "Scaling Relationship on Learning Mathematical Reasoning with Large Language Models",
    arXiv:2308.01825: the policy's distinct correct answers are added to the data of SFT, and the base model of SFT is
    trained on both. RFT is a baseline of ETO (arXiv:2403.02502), DMPO and tlm-DRE.
    Differs: episodes are equal if they have the same actions; Yuan et al. compare equations. They draw 100 samples per
    task.
    """

    traits: ClassVar[RowTraits] = RowTraits("single", expert=True, starts_over=True, names_policy=True)
    needs: ClassVar[tuple[Need, ...]] = ()

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the expert's episodes, followed by the policy's successes."""
        divided = divide(inputs, starts_over=True)
        return Made([weighted(one) for one in (*divided.sft_episodes, *divided.successes)], divided.counts)
