"""The adapter of prime-rl: on stand-ins of what its algorithms are given, and on verifiers' own traces.

prime-rl is not installed, since it needs a GPU. Its `GRPOAlgorithm` takes the mean of a group off each reward, for
every sampled token. The last test runs where verifiers is installed.
"""

import asyncio
import random
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from perturn.adapters.host_credits import STATES, host_credit
from perturn.adapters.prime_rl import install, weigh_rollouts, weigh_traces
from perturn.credit import CREDITS
from perturn.errors import ConfigError, DataError
from support.hosts import host


@dataclass
class Node:
    """A message of verifiers, as far as prime-rl's algorithms read it."""

    mask: list
    advantages: list | None = None


@dataclass
class Trace:
    """A trace of verifiers, as far as prime-rl's algorithms read it."""

    reward: float
    nodes: list
    info: dict = field(default_factory=dict)
    ok: bool = True
    agent: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(trainable=True))


@dataclass
class Rollout:
    """A rollout of prime-rl 0.7 and 0.8.0, as far as its algorithms read it."""

    reward: float
    samples: list
    info: dict = field(default_factory=dict)
    advantages: list | None = None

    def assign_advantages(self, values):
        """Keep them, as prime-rl does."""
        assert len(values) == sum(len(sample.mask) for sample in self.samples)
        self.advantages = values


def masks(draw):
    return [[False] * draw.randint(1, 3) + [True] * draw.randint(1, 3) for _ in range(draw.randint(1, 4))]


def test_dr_grpo_equals_grpo_of_prime_rl_on_a_thousand_groups():
    credit = host_credit("prime-rl", "dr-grpo", {})
    for seed in range(1000):
        draw = random.Random(seed)
        rewards = [draw.choice([0.0, 1.0, draw.gauss(0, 1)]) for _ in range(draw.randint(1, 6))]
        traces = [Trace(one, [Node([False, False]), *map(Node, masks(draw))]) for one in rewards]
        weigh_traces(traces, credit)
        mean = sum(rewards) / len(rewards)
        for trace, reward in zip(traces, rewards, strict=True):
            assert trace.nodes[0].advantages is None
            found = [value for node in trace.nodes[1:] for value in node.advantages]
            assert found == pytest.approx(
                [reward - mean] * sum(map(sum, (n.mask for n in trace.nodes))), abs=1e-6
            )


def test_traces_with_an_error_are_left_out():
    failed = Trace(9.0, [Node([True])], ok=False)
    traces = [Trace(1.0, [Node([True])]), Trace(0.0, [Node([True])]), failed]
    weigh_traces(traces, host_credit("prime-rl", "rloo", {}))
    assert [trace.nodes[0].advantages for trace in traces] == [[1.0], [-1.0], None]


def test_states_and_rewards_come_from_info_of_traces_and_of_rollouts():
    credit = host_credit("prime-rl", CREDITS["gigpo"](gamma=0.9), {STATES: None})
    info = [{"state_keys": ["a", "b"], "turn_rewards": [0.25, 0.0]}, {"state_keys": ["a", "c"]}]
    turns = [[[False, True, True], [False, True]], [[True], [True, True]]]
    traces = [Trace(float(at), [*map(Node, own)], info[at]) for at, own in enumerate(turns)]
    weigh_traces(traces, credit)
    rollouts = [
        Rollout(float(at), [SimpleNamespace(mask=mask) for mask in own], info[at])
        for at, own in enumerate(turns)
    ]
    weigh_rollouts(rollouts, credit)
    for trace, rollout in zip(traces, rollouts, strict=True):
        trained = [one for sample in rollout.samples for one in sample.mask]
        spread = [value for value, own in zip(rollout.advantages, trained, strict=True) if own]
        assert spread == [value for node in trace.nodes for value in node.advantages]
    with pytest.raises(DataError, match="expected a state for each of the 2 turns"):
        weigh_traces([Trace(1.0, [Node([True]), Node([True])], {"state_keys": ["a"]})] * 2, credit)


def test_a_state_after_the_last_turn_of_a_trace_is_ignored():
    """A recorded list of states often ends with the state after the last turn; a surplus reward counts for it."""
    credit = host_credit("prime-rl", "gigpo", {STATES: None})
    exact = {"state_keys": ["a", "b"], "turn_rewards": [0.5, 0.25]}
    surplus = {"state_keys": ["a", "b", "c"], "turn_rewards": [0.5, 0.125, 0.125]}
    found = []
    for info in (exact, surplus):
        traces = [Trace(reward, [Node([True]), Node([True])], info) for reward in (1.0, 0.0)]
        rollouts = [Rollout(one.reward, [SimpleNamespace(mask=[True, False, True])], info) for one in traces]
        weigh_traces(traces, credit)
        weigh_rollouts(rollouts, credit)
        found.append(
            [[node.advantages for one in traces for node in one.nodes], [r.advantages for r in rollouts]]
        )

    assert found[0] == found[1]


class Algorithm:
    """An algorithm of prime-rl, as far as the adapter reads it."""

    action_loss_type = "rl"

    def __init__(self, length_penalty=None):
        self.length_penalty = length_penalty


@pytest.mark.parametrize("name", ["rae", "opd", "gpro"])
def test_an_algorithm_that_reads_no_credit_of_groups_is_rejected(monkeypatch, name):
    """One compares otherwise, the loss of another reads no advantages, and the last does not exist."""
    opd = type("OPD", (Algorithm,), {"action_loss_type": "ref_kl"})
    classes = {"grpo": Algorithm, "rae": Algorithm, "opd": opd}
    module = SimpleNamespace(ALGORITHM_CLASSES=classes)
    for each in ("prime_rl", "prime_rl.orchestrator"):
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    monkeypatch.setitem(sys.modules, "prime_rl.orchestrator.algo", module)

    with pytest.raises(ConfigError, match=rf"algorithm '{name}' cannot be replaced\..* Known: grpo\."):
        install("rloo", name)

    install("rloo", "grpo")
    classes["grpo"]()
    with pytest.raises(ConfigError, match=r"orchestrator\.algo\.length_penalty must be left out"):
        classes["grpo"](length_penalty=1)


@pytest.mark.slow
def test_traces_of_verifiers():
    vf = host("verifiers.v1")
    from perturn.adapters.prime_rl import PerTurnCredit

    episodes = [episode_of(vf, reward) for reward in (1.0, 0.0)]
    asyncio.run(type("Own", (PerTurnCredit,), {"credit": "rloo"})().score_group(episodes))
    for one, expected in zip(episodes, (1.0, -1.0), strict=True):
        (branch,) = one.traces[0].branches
        assert branch.advantages == [0, 0, expected, expected, 0, expected]


def episode_of(vf, reward):
    """An episode of verifiers: two turns of the policy, with an observation between."""

    def node(parent, role, tokens, mask, sampled=False):
        kinds = {"user": vf.UserMessage, "assistant": vf.AssistantMessage}
        logprobs = [-0.5] * sum(mask)
        return vf.MessageNode(
            parent=parent,
            message=kinds[role](content=role),
            sampled=sampled,
            token_ids=tokens,
            mask=mask,
            logprobs=logprobs,
        )

    nodes = [
        node(None, "user", [1, 2], [False, False]),
        node(0, "assistant", [3, 4], [True, True], True),
        node(1, "user", [5], [False]),
        node(2, "assistant", [6], [True], True),
    ]
    task = vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt="go"), key="task-0")
    trace = vf.Trace(
        task=task,
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        rewards={"r": vf.Reward(score=reward)},
        ok=True,
    )
    return vf.Episode(task=task, traces=[trace], ok=True)
