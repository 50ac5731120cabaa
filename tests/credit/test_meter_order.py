"""The meter lists each group in one order, so it rejects a credit that depends on the order."""

from itertools import pairwise

import pytest
import torch

from perturn.credit import CreditTraits
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES


class Previous:
    """The score of the previous episode is the baseline, which is unbiased."""

    needs = ()
    traits = CreditTraits(needs_group=True)

    def __call__(self, group, **_):
        """Return one weight for all turns of an episode."""
        scores = [one.total_reward for one in group]
        gains = [scores[0], *(own - last for last, own in pairwise(scores))]
        return [torch.full((len(one.turns),), gain) for one, gain in zip(group, gains, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_credit_that_depends_on_the_order_of_a_group_is_rejected(size):
    with pytest.raises(
        ValueError, match="Previous gives other weights to the same episodes in another order"
    ):
        measure(Previous(), PROCESSES[0], size)
