"""The adapter of SkyRL against its own trainer and estimators, on random batches; it runs where SkyRL is installed."""

import sys
import typing
from types import SimpleNamespace

import pytest
import torch
import typing_extensions

from perturn.adapters import skyrl as adapter
from perturn.adapters.host_batches import HostEpisode
from perturn.credit import CREDITS
from perturn.errors import ConfigError
from support.host_batches import random_batch
from support.hosts import host

if sys.version_info < (3, 12):  # where pydantic rejects SkyRL's TypedDicts
    typing.TypedDict = typing_extensions.TypedDict
trainers = host("skyrl.train.trainer")
batches = host("skyrl.backends.skyrl_train.training_batch")

pytestmark = pytest.mark.slow

BATCHES = 1000


def trainer_of(credit, *, step_wise=False, estimator="rloo", norm=True, critic=None, **own):
    """SkyRL's trainer with the adapter, without workers."""
    algorithm = SimpleNamespace(advantage_estimator=estimator, gamma=1.0, lambd=1.0, grpo_norm_by_std=norm)
    config = SimpleNamespace(
        trainer=SimpleNamespace(
            algorithm=algorithm, critic=SimpleNamespace(model=SimpleNamespace(path=critic))
        ),
        generator=SimpleNamespace(step_wise_trajectories=step_wise),
    )

    class Own(trainers.RayPPOTrainer):
        def __init__(self, cfg):
            self.cfg, self.all_metrics = cfg, {}

    return type("Trainer", (adapter.PerTurnAdvantages, Own), {"credit": credit, **own})(config)


def input_of(batch, states=None, pad=0):
    """SkyRL's input of a batch: `response_mask` has observations, `loss_mask` has none."""
    made = batches.TrainingInputBatch(
        {
            "response_mask": batch.response,
            "loss_mask": batch.mask,
            "rewards": batch.rewards,
            "values": batch.values,
        }
    )
    made.metadata = {"uids": list(batch.groups), "avg_response_length": 1.0, "state_keys": states}
    return batches.pad_training_input_batch(made, pad)


@pytest.mark.parametrize(
    ("credit", "estimator", "norm"),
    [
        ({"name": "rloo"}, "rloo", True),
        ({"name": "grpo", "singleton": "raw"}, "grpo", True),
        ({"name": "grpo", "singleton": "raw", "normalize": "mean"}, "grpo", False),
    ],
)
def test_estimators_of_groups_equal_skyrls(credit, estimator, norm):
    """On the tokens that are trained. A batch whose group has equal rewards is left to the next test for GRPO."""
    trainer = trainer_of(credit, estimator=estimator, norm=norm)
    base = trainers.RayPPOTrainer.compute_advantages_and_returns
    for seed in range(BATCHES):
        batch = random_batch(seed)
        expected = base(trainer, input_of(batch, pad=1))["advantages"][:-1] * batch.mask
        found = trainer.compute_advantages_and_returns(input_of(batch, pad=1))["advantages"]
        assert not found[-1].any()
        worst = (found[:-1] - expected).abs().max()
        assert worst <= 1e-6, (seed, worst)


def test_gae_equals_skyrls_on_one_turn_of_one_token():
    """SkyRL's goes over observations too and whitens; with one token before whitening both are the reward less V."""
    trainer = trainer_of("turn-gae", estimator="gae", critic="critic")
    for seed in range(BATCHES):
        batch = random_batch(seed, 1)
        batch.mask[:, 1:] = 0
        batch.values *= batch.mask
        batch.rewards *= batch.mask
        found = trainer.compute_advantages_and_returns(input_of(batch))
        torch.testing.assert_close(
            found["advantages"], (batch.rewards - batch.values) * batch.mask, atol=1e-6, rtol=0
        )
        torch.testing.assert_close(found["returns"][:, 0], batch.rewards[:, 0], atol=1e-6, rtol=0)


def test_steps_are_turns_of_one_trajectory_with_their_own_rewards():
    trainer = trainer_of(
        CREDITS["gigpo"](gamma=0.9), step_wise=True, state_keys=lambda self, output: output["states"]
    )
    mask = torch.tensor([[1.0, 1], [1, 0], [1, 1]])
    made = batches.TrainingInputBatch(
        {
            "response_mask": mask,
            "loss_mask": mask,
            "rewards": torch.tensor([[0.0, 0.5], [1, 0], [0, 0]]),
            "values": None,
        }
    )
    made.metadata = {
        "uids": ["g", "g", "g"],
        "is_last_step": [False, True, True],
        "avg_response_length": 1.0,
        "state_keys": [["a"], ["b"], ["a"]],
    }
    found = trainer.compute_advantages_and_returns(made)["advantages"]
    group = [HostEpisode("g", [0.5, 1.0], ["a", "b"]), HostEpisode("g", [0.0], ["a"])]
    first, second = CREDITS["gigpo"](gamma=0.9)([one.trajectory(at) for at, one in enumerate(group)])
    expected = [[first[0], first[0]], [first[1], 0], [second[0], second[0]]]
    torch.testing.assert_close(found, torch.tensor(expected).float())


def test_what_skyrl_is_not_told_is_rejected():
    with pytest.raises(ConfigError, match="override state_keys"):
        trainer_of("anchor-rloo")
    with pytest.raises(ConfigError, match=r"needs values.*trainer\.critic\.model\.path"):
        trainer_of("turn-gae")
