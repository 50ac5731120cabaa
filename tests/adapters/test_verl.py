"""The adapter of verl against verl's own estimators, on random batches; it runs where verl is installed."""

import numpy as np
import pytest
import torch

from perturn.adapters import verl as adapter
from perturn.adapters.host_batches import HostEpisode, turn_spans
from perturn.adapters.host_credits import host_credit
from perturn.credit import CREDITS
from perturn.errors import ConfigError
from support.host_batches import random_batch
from support.hosts import host

algos = host("verl.trainer.ppo.core_algos")

BATCHES = 1000

pytestmark = pytest.mark.slow


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("credit", "own", "settings"),
    [
        ({"name": "rloo", "singleton": "raw"}, "rloo", {}),
        ({"name": "grpo", "singleton": "raw"}, "grpo", {}),
        (
            {"name": "grpo", "singleton": "raw", "normalize": "mean"},
            "grpo",
            {"norm_adv_by_std_in_grpo": False},
        ),
    ],
)
def test_estimators_of_groups_equal_verls(credit, own, settings):
    """In float64: in float32 verl's std of equal rewards is rounding, which 1e-6 divides by."""
    estimator = adapter.register(credit, name=f"perturn-{own}-{settings}")
    assert algos.get_adv_estimator_fn(f"perturn-{own}-{settings}") is estimator
    for seed in range(BATCHES):
        batch = random_batch(seed)
        index = np.array(batch.groups, dtype=object)
        expected, _ = algos.get_adv_estimator_fn(own)(
            token_level_rewards=batch.outcome, response_mask=batch.mask, index=index, **settings
        )
        found, _ = estimator(batch.outcome, batch.mask, index, config=None)
        assert_close(found, expected)


@pytest.mark.parametrize(("gamma", "lam", "longest"), [(1.0, 1.0, 4), (0.9, 0.8, 1)])
def test_gae_equals_verls(gamma, lam, longest):
    """Of verl before whitening: at first tokens of turns with gamma = lam = 1, and for turns of one token with any."""
    credit = host_credit("verl", {"name": "turn-gae", "gamma": gamma, "lam": lam}, {"values": None})
    for seed in range(BATCHES):
        batch = random_batch(seed, longest)
        _, returns = algos.compute_gae_advantage_return(
            token_level_rewards=batch.rewards,
            values=batch.values,
            response_mask=batch.mask,
            gamma=gamma,
            lam=lam,
        )
        estimator = adapter.Estimator(credit, {"values": batch.values})
        found, targets = estimator(batch.rewards, batch.mask, batch.groups)
        first = torch.zeros_like(batch.mask, dtype=torch.bool)
        for row, mask in zip(first, batch.mask.tolist(), strict=True):
            row[[start for start, _ in turn_spans(mask)]] = True
        assert_close(found[first], (returns - batch.values)[first])
        assert_close(targets[first], returns[first])


def test_what_an_estimator_is_not_given_is_rejected():
    with pytest.raises(
        ConfigError, match="PerTurnAdvantages into the trainer, and put state_keys into extra_fields"
    ):
        adapter.register("gigpo")
    with pytest.raises(ConfigError, match=r"needs values.*critic\.enable=True"):
        adapter.register("turn-gae")


def test_the_trainers_step_hands_over_states_and_joins_outputs_of_a_session(monkeypatch):
    """Verl's own `_compute_advantage` runs; its queue between processes is replaced by tensors in memory."""
    tq = host("transfer_queue")
    base = host("verl.trainer.ppo.v1.trainer_base")
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack, TensorDict

    class Trainer(adapter.PerTurnAdvantages, base.PPOTrainer):
        credit = CREDITS["gigpo"](gamma=0.9)

        def __init__(self, config):
            self.config = config
            super().__init__(config)

    Trainer.__abstractmethods__ = frozenset()
    monkeypatch.setattr(base.PPOTrainer, "__init__", lambda self, config: None)
    algorithm = {"adv_estimator": "perturn-trainer", "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0}
    given = {"critic": {"enable": False}, "algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}}
    config = OmegaConf.create(given)
    mask = [
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1.0, 0, 1, 0],
    ]  # the first session has two outputs, which verl has reordered
    rewards = [[0, 1, 0, 0], [0, 0, 0, 0], [0.0, 0, 1, 0]]
    records = [{"state_keys": ["c"]}, {"state_keys": ["a", "b"]}, {"state_keys": ["a", "b"]}]

    def nested(rows):
        return torch.nested.nested_tensor(
            [torch.tensor(row, dtype=torch.float32) for row in rows], layout=torch.jagged
        )

    queue = TensorDict(
        {
            "uid": NonTensorStack("u", "u", "u"),
            "response_mask": nested(mask),
            "rm_scores": nested(rewards),
            "extra_fields": NonTensorStack(*records),
        },
        batch_size=3,
    )
    written = {}
    monkeypatch.setattr(
        tq, "kv_batch_get", lambda select_fields, **_: queue.select(*select_fields, strict=False)
    )
    monkeypatch.setattr(tq, "kv_batch_put", lambda fields, **_: written.update(fields.items()))
    meta = tq.KVBatchMeta(keys=["u_0_1", "u_1_0", "u_0_0"], partition_id="train", tags=[{}, {}, {}])
    Trainer(config)._compute_advantage(meta, {})
    found = written["advantages"].to_padded_tensor(0.0)
    group = [HostEpisode("u", [0, 0, 1.0], ["a", "b", "c"]), HostEpisode("u", [0, 0.0], ["a", "b"])]
    first, second = CREDITS["gigpo"](gamma=0.9)([one.trajectory(at) for at, one in enumerate(group)])
    assert_close(found[2], torch.tensor([first[0], 0, first[1], 0]).float())
    assert_close(found[0], torch.tensor([first[2], first[2], 0, 0]).float())
    assert_close(found[1], torch.tensor([second[0], 0, second[1], 0]).float())
