"""Ranking accuracy: how often the policy itself finds the chosen side likelier."""

from perturn.losses import LOSSES, TurnLogprobs
from perturn.training.pair_ranking import Ranking
from perturn.training.trainer_evaluation import row_metrics


def test_by_hand():
    """Chosen -1 and -5 nats, rejected -2 and -4: the first pair is ranked right.

    Against the reference, -3 for the chosen and -1 for the rejected sides, both rewards of DPO are the other way round:
    2 over -1, and -2 over -3.
    """
    chosen = TurnLogprobs.from_nested([[[-1.0]], [[-2.0, -3.0]]], [[[-3.0]], [[-1.0, -2.0]]])
    rejected = TurnLogprobs.from_nested([[[-2.0]], [[-4.0]]], [[[-1.0]], [[-1.0]]])

    found = row_metrics(LOSSES["dpo"](beta=1.0), chosen, rejected)

    assert found["logps/accuracies"].tolist() == [1.0, 0.0]
    assert found["rewards/accuracies"].tolist() == [1.0, 1.0]


def test_a_low_accuracy_says_that_length_counts():
    """The note appears below one half."""
    assert str(Ranking(10, None, 0.5)) == "ranking accuracy on the 10 training pairs: 50.0 % after training"
    assert str(Ranking(10, 0.0, 0.4)) == (
        "ranking accuracy on the 10 training pairs: 0.0 % before training, 40.0 % after training "
        "(log-probabilities are sums, so a longer side is less likely)"
    )
