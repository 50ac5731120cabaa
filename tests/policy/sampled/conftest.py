"""Groups of sampled episodes, and a trainer on them."""

import pytest

from .episodes import WORDS, play


@pytest.fixture
def groups(tiny_model, renderer):
    """Two tasks of three episodes each, of 1 to 3 turns, with rewards that differ in the first task alone."""
    return [
        play(
            tiny_model,
            renderer,
            [" ".join(WORDS[i + k : i + k + 1 + (i + k) % 3]) for k in range(1 + i % 3)],
            task=f"t/{i // 3}",
            reward=float(i in (1, 2)),
            noise=0.2,
        )
        for i in range(6)
    ]


@pytest.fixture
def train(make_trainer):
    """Make a trainer on groups by gradient descent without a moment; as `make_trainer`."""
    usual = {"loss": "ppo-clip", "learning_rate": 0.1, "num_train_epochs": 1, "optim": "sgd"}
    usual |= {"per_device_train_batch_size": 6, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    return lambda rows, model=None, **settings: make_trainer(rows, model, **{**usual, **settings})
