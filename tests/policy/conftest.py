"""A trainer of pairs, for the tests of the trainer."""

import pytest

from .training import PAIRS


@pytest.fixture
def train(make_trainer):
    """Make a trainer of the pairs, two at a time; as `make_trainer`."""
    usual = {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "num_train_epochs": 1}
    return lambda rows=PAIRS, model=None, **settings: make_trainer(rows, model, **{**usual, **settings})
