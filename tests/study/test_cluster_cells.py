"""Nodes that do the cells of a study: which are taken, and which are rejected. The cluster is made up."""

from types import SimpleNamespace

import pytest

from perturn.cluster.ray_connection import Lost, identity
from perturn.config.sections import Cluster
from perturn.errors import ConfigError
from perturn.study import cluster_cells
from perturn.study.cluster_cells import Nodes

DIED = Lost("ActorDiedError: The actor died because its node has died.", None)


class Answers:
    """A cluster whose nodes give these answers, in this order; an exception is raised."""

    def __init__(self, answers):
        self.answers, self.started, self.ended = iter(answers), [], []

    def require_node(self, what, cpus, gpus):
        """Have a node that is large enough."""

    def actor(self, kind, *arguments, **options):
        """Return an actor whose calls say their names."""

        def call(name):
            return SimpleNamespace(remote=lambda *_: name)

        self.started.append(SimpleNamespace(identity=call("identity"), holds=call("holds")))
        return self.started[-1]

    def get(self, reference, seconds=None):
        """Return the next answer."""
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return identity() if answer == "this perturn" else answer

    def end(self, server):
        """Note that a server is ended."""
        self.ended.append(server.actor)


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """Nodes of a cluster that gives some answers, and this cluster."""

    def made(*answers):
        cluster = Answers(answers)
        monkeypatch.setattr(cluster_cells, "Connection", lambda _: cluster)
        return Nodes(Cluster("auto"), tmp_path, None), cluster

    return made


def test_a_node_that_is_lost_while_it_is_checked_is_replaced(nodes, tmp_path):
    """It says nothing of other nodes."""
    there, cluster = nodes(DIED, "this perturn", True)

    assert there.server().actor is cluster.started[1]
    assert cluster.ended == cluster.started[:1]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("answers", "why", "ended"),
    [
        ((DIED, DIED), "its node has died", 2),
        (("this perturn", False), "it does not see the folder", 1),
        ((Lost("no folder", OSError()),), "no folder", 1),
    ],
    ids=["lost twice", "sees another disk", "raises"],
)
def test_a_node_that_cannot_do_a_cell_is_an_error(nodes, answers, why, ended):
    """Its server is ended, and nothing is left waiting."""
    there, cluster = nodes(*answers)

    with pytest.raises(ConfigError, match=f"cannot work in .*{why}"):
        there.server()

    assert len(cluster.ended) == len(cluster.started) == ended
