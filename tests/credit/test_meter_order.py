"""The meter lists each group in one order, so it rejects a credit that depends on the order, or is random."""

import pytest
import torch

from perturn.credit import CreditTraits
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES


def previous(scores):
    """The score of the previous episode is the baseline, which is unbiased."""
    return [0.0, *scores[:-1]]


def neighbours(scores):
    """The mean of the two neighbours in a circle, which is the same in reversed order."""
    return [(scores[i - 1] + scores[(i + 1) % len(scores)]) / 2 for i in range(len(scores))]


def drawn(scores):
    """A baseline that is random."""
    return torch.rand(len(scores)).tolist()


class Own:
    """The score less a baseline."""

    needs = ()
    traits = CreditTraits(needs_group=True)

    def __init__(self, baseline):
        self.baseline = baseline

    def __call__(self, group, **_):
        """Return one weight for all turns of an episode."""
        scores = [one.total_reward for one in group]
        gains = [own - base for own, base in zip(scores, self.baseline(scores), strict=True)]
        return [torch.full((len(one.turns),), gain) for one, gain in zip(group, gains, strict=True)]


@pytest.mark.parametrize(
    ("baseline", "size", "says"),
    [
        (previous, 2, "in another order"),
        (previous, 3, "in another order"),
        (neighbours, 4, "in another order"),
        (drawn, 2, "again; it is random"),
    ],
)
def test_a_credit_that_depends_on_more_than_the_episodes_is_rejected(baseline, size, says):
    with pytest.raises(
        ValueError, match=f"cannot be measured: it gives other weights to the same episodes {says}"
    ):
        measure(Own(baseline), PROCESSES[0], size)
