"""The adapter of tinker-cookbook against its own functions, on random groups; it runs where that is installed."""

import random

import pytest
import torch

from perturn.adapters import tinker_cookbook as adapter
from perturn.adapters.host_batches import HostEpisode
from perturn.credit import CREDITS
from perturn.errors import DataError
from support.hosts import host

processing = host("tinker_cookbook.rl.data_processing")
tinker = host("tinker")
types = host("tinker_cookbook.rl.types")
completers = host("tinker_cookbook.completers")

pytestmark = pytest.mark.slow


def trajectory(draw, first=1):
    """Turns that each extend the one before, but for some that begin another sequence."""
    seen, transitions = [], []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.2:
            seen = []
        seen = seen + [7] * draw.randint(first, 3)
        action = [9] * draw.randint(1, 3)
        transitions.append(
            types.Transition(
                ob=tinker.ModelInput.from_ints(list(seen)),
                ac=completers.TokensWithLogprobs(
                    tokens=action, maybe_logprobs=[-0.5] * len(action), stop_reason="stop"
                ),
                reward=draw.choice([0.0, 1.0, draw.gauss(0, 1)]),
                episode_done=False,
                metrics={types.PARSE_ERROR_MASKED_METRIC_KEY: 1.0} if draw.random() < 0.1 else {},
                logs={"state_key": draw.choice("ab")},
            )
        )
        seen = seen + action
    return types.Trajectory(transitions=transitions, final_ob=tinker.ModelInput.from_ints([]))


def groups_of(seed, **own):
    draw = random.Random(seed)
    found = []
    for _ in range(2):
        size = draw.randint(1, 4)
        found.append(
            types.TrajectoryGroup(
                [trajectory(draw, **own) for _ in range(size)],
                [draw.choice([0.0, 1.0]) for _ in range(size)],
                [{}] * size,
            )
        )
    return found


def test_dr_grpo_equals_tinker_cookbooks_on_a_thousand_batches():
    credit = adapter.make_credit({"name": "dr-grpo"})
    for seed in range(1000):
        groups = groups_of(seed)
        expected, origins = processing.assemble_training_data(groups, processing.compute_advantages(groups))
        found, own = adapter.assemble_training_data(groups, credit)
        assert own == origins
        for one, other in zip(found, expected, strict=True):
            assert one.model_input == other.model_input
            for name in ("advantages", "mask", "target_tokens", "logprobs"):
                numbers = [each.loss_fn_inputs[name].to_torch() for each in (one, other)]
                torch.testing.assert_close(*numbers, atol=1e-6, rtol=0)


def test_states_and_rewards_of_transitions_are_read():
    (group,) = groups_of(5)[:1]
    credit = CREDITS["anchor-rloo"](gamma=0.9)
    found = adapter.turn_advantages([group], adapter.make_credit(credit))[0]
    members = []
    for at, (one, final) in enumerate(zip(group.trajectories_G, group.final_rewards_G, strict=True)):
        rewards = [each.reward for each in one.transitions]
        rewards[-1] += final
        members.append(
            HostEpisode("0", rewards, [each.logs["state_key"] for each in one.transitions]).trajectory(at)
        )
    assert found == [weights.tolist() for weights in credit(members)]


def test_an_action_without_observation_is_rejected():
    seeds = (groups_of(seed, first=0) for seed in range(50))
    group = next(each for each in seeds if each[0].trajectories_G[0].transitions[0].ob.length == 0)
    with pytest.raises(DataError, match="give every transition an observation"):
        adapter.assemble_training_data(group, adapter.make_credit("rloo"))
