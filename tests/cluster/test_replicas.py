"""Replicas of the policy on a cluster."""

import os
import signal
import time
from collections import Counter

import pytest

from cluster.nodes import WARNINGS, Reads, Script, Waits, prompt
from perturn.cluster import Replicas
from perturn.config.sections import Cluster
from perturn.types import Sampling

pytest.importorskip("ray", reason='needs pip install "perturn[ray]"')
pytestmark = WARNINGS


@pytest.mark.cluster
def test_a_conversation_stays_with_its_replica_until_that_is_lost(nodes):
    """Four conversations, two replicas: two each, turn after turn; when one is killed, the other has all four."""
    nodes.add(1)
    replicas = Replicas(Cluster(nodes.address, engines=2), Script, "none")

    def ask(turn):
        texts = [one.text for one in replicas.generate([prompt(str(n)) for n in range(4)], Sampling())]
        return [int(text.split()[-1]) for text in texts]

    first = ask(0)
    assert ask(1) == first
    assert sorted(Counter(first).values()) == [2, 2]
    os.kill(first[0], signal.SIGKILL)
    after = ask(2)
    assert first[0] not in after
    assert [new for new, old in zip(after, first, strict=True) if old != first[0]] == [
        old for old in first if old != first[0]
    ]
    replicas.close()


@pytest.mark.cluster
def test_a_prompt_is_answered_while_another_one_is(nodes):
    """A streaming engine on a node takes prompts on as they come, as it does in this process."""
    nodes.add(1)
    replicas = Replicas(Cluster(nodes.address, engines=1), Waits, "none")
    replicas.submit([prompt("slow")], Sampling())
    assert replicas.advance() == []
    replicas.submit([prompt(str(n)) for n in range(3)], Sampling())

    order = []
    while len(order) < 4:
        order += [asked.conversation for asked, _ in replicas.advance()]
    replicas.close()

    assert sorted(order[:3]) == ["0", "1", "2"]
    assert order[3] == "slow"


@pytest.mark.cluster
def test_all_replicas_serve_new_weights_also_one_that_is_lost_later(nodes, tmp_path):
    """Two replicas of weights `one` are given `two`; one is killed, and what is started in its place has `two`."""
    nodes.add(1)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.json").write_text(name)
    replicas = Replicas(Cluster(nodes.address, engines=2), Reads, str(tmp_path / "one"))

    def ask():
        texts = [one.text for one in replicas.generate([prompt(str(n)) for n in range(4)], Sampling())]
        return {text.split()[0] for text in texts}, {int(text.split()[1]) for text in texts}

    before, _ = ask()
    replicas.update_weights(tmp_path / "two", "new@2")
    after, pids = ask()
    os.kill(min(pids), signal.SIGKILL)
    until = time.monotonic() + 60
    while len(replicas._living) < 2 or min(pids) in ask()[1]:
        assert time.monotonic() < until
        replicas.advance()
    last, others = ask()
    replicas.close()

    assert (before, after, last) == ({"one"}, {"two"}, {"two"})
    assert len(pids) == 2
    assert not others & {min(pids)}
    assert replicas.name == "new@2"
