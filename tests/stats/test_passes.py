"""Pass^k and pass@k: values by hand, the papers' own form, and that pass@k is unbiased."""

import math

import pytest

from perturn.stats import pass_at, pass_hat


def test_pass_hat_by_hand():
    """Of 4 episodes 4, 2 and 0 succeed: pass^1 is (1 + 1/2 + 0) / 3, and pass^2 (1 + 1/6 + 0) / 3."""
    outcomes = [(4, 4), (4, 2), (4, 0)]

    assert pass_hat(outcomes, 1).mean == pytest.approx(1.5 / 3)
    assert pass_hat(outcomes, 2).mean == pytest.approx((1 + 1 / 6) / 3)
    assert pass_hat(outcomes, 4).mean == pytest.approx(1 / 3)
    assert pass_hat(outcomes, 2).n == 3
    with pytest.raises(ValueError, match="fewest episodes of a task, got 5"):
        pass_hat(outcomes, 5)


def test_pass_at_by_hand():
    """Of 4 episodes 4, 2 and 0 succeed: pass@1 is (1 + 1/2 + 0) / 3; pass@2 (1 + (1 - 1/6) + 0) / 3; pass@4 2 / 3."""
    outcomes = [(4, 4), (4, 2), (4, 0)]

    assert pass_at(outcomes, 1).mean == pytest.approx(1.5 / 3)
    assert pass_at(outcomes, 2).mean == pytest.approx((1 + 5 / 6) / 3)
    assert pass_at(outcomes, 4).mean == pytest.approx(2 / 3)
    assert pass_at(outcomes, 2).n == 3
    with pytest.raises(ValueError, match="k must be from 1"):
        pass_at(outcomes, 0)


def test_pass_at_agrees_with_the_papers_product():
    """Chen et al. 2021, Figure 3: 1 - prod(1 - k / (n - c + 1 ... n)); it is 1 where fewer than k episodes failed."""
    for n, c, k in ((10, 3, 4), (10, 0, 4), (10, 7, 4), (20, 1, 10)):
        product = 1.0 if n - c < k else 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))

        assert pass_at([(n, c)], k).mean == pytest.approx(product)


def test_pass_at_is_unbiased():
    """Success probability 0.3, n = 5, k = 3: the mean over all counts of successes is 1 - 0.7^3."""
    expected = sum(math.comb(5, c) * 0.3**c * 0.7 ** (5 - c) * pass_at([(5, c)], 3).mean for c in range(6))

    assert expected == pytest.approx(1 - 0.7**3)
