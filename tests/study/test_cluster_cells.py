"""Nodes that do the cells of a study: which are taken, and which are rejected. The cluster is made up."""

from types import SimpleNamespace

import pytest

from perturn.cluster.ray_connection import Lost, identity
from perturn.config.sections import Cluster
from perturn.errors import ConfigError
from perturn.study import cluster_cells
from perturn.study.cluster_cells import Nodes

DIED = Lost("ActorDiedError: The actor died because its node has died.", None)
WELL = {"identity": identity(), "holds": True, "work": None}


class FewActors:
    """A cluster whose actors have these answers, by method. One that is missing has not come; exceptions are raised."""

    def __init__(self, *answers):
        self.answers, self.started, self.ended = iter(answers), [], []

    def require_node(self, what, cpus, gpus):
        """Have a node that is large enough."""

    def actor(self, kind, *arguments, **options):
        """Start the next actor; a call returns its reference, which is the actor's answers and the method."""
        mine = dict(next(self.answers))
        calls = {name: SimpleNamespace(remote=lambda *_, name=name: (mine, name)) for name in WELL}
        self.started.append(SimpleNamespace(mine=mine, **calls))
        return self.started[-1]

    def ready(self, references, seconds=0.0):
        """Return the references whose answers have come."""
        return [(mine, name) for mine, name in references if name in mine]

    def get(self, reference, seconds=None):
        """Return an answer."""
        mine, name = reference
        if isinstance(mine[name], Exception):
            raise mine[name]
        return mine[name]

    def end(self, server):
        """Note that a server is ended."""
        self.ended.append(server.actor)


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The nodes of a cluster whose actors have some answers, a worker of one cell there, and the cluster."""

    def made(*answers):
        cluster = FewActors(*answers)
        monkeypatch.setattr(cluster_cells, "Connection", lambda _: cluster)
        nodes = Nodes(Cluster("auto"), tmp_path, None)
        return nodes, nodes.start(None, {}, True, tmp_path / "log"), cluster

    return made


def ends(worker):
    """Return whether a worker ends within a few looks."""
    return any(worker.has_ended for _ in range(9))


def test_a_cell_waits_for_its_server_and_then_for_its_work(begun, tmp_path):
    """Nobody waits meanwhile: another look says how far it is."""
    nodes, worker, cluster = begun({})
    mine = cluster.started[0].mine

    assert not worker.has_ended
    assert len(list(tmp_path.iterdir())) == 1  # the file that the node is to see
    mine |= {"identity": identity(), "holds": True}
    assert not worker.has_ended
    assert worker.reply == (mine, "work")
    mine["work"] = "failed: no such model"
    assert worker.has_ended
    assert worker.error() == "failed: no such model"

    nodes.close()
    assert cluster.ended == cluster.started
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "lost", [{"identity": DIED, "holds": DIED}, WELL | {"work": DIED}], ids=["checked", "at work"]
)
def test_a_cell_whose_node_is_lost_is_begun_on_another(begun, lost):
    """Once more, and not a third time."""
    _, worker, cluster = begun(lost, WELL)

    assert ends(worker)

    assert worker.error() is None
    assert cluster.ended == cluster.started[:1]

    _, worker, cluster = begun(lost, lost)
    assert ends(worker)
    assert worker.error() == f"its process on a node was lost: {DIED}"
    assert cluster.ended == cluster.started


def test_a_cell_is_not_begun_again_on_an_idle_server_of_the_lost_node(begun, tmp_path):
    """Both servers were on the node; the second try starts a server elsewhere."""
    nodes, first, cluster = begun(WELL, WELL | {"work": DIED}, WELL)
    second = nodes.start(None, {}, True, tmp_path / "log")
    assert ends(first)
    cluster.started[0].mine |= dict.fromkeys(WELL, DIED)

    assert ends(second)

    assert second.error() is None
    assert second.server.actor is cluster.started[2]
    assert {id(each) for each in cluster.ended} == {id(each) for each in cluster.started[:2]}


def test_a_server_that_finds_no_room_makes_way_for_an_idle_one(begun, tmp_path):
    """Else both would wait for ever: the idle one keeps the room that the other waits for."""
    nodes, first, cluster = begun(WELL, {})
    second = nodes.start(None, {}, True, tmp_path / "log")
    assert not second.has_ended
    assert ends(first)

    assert ends(second)

    assert cluster.ended == cluster.started[1:]
    assert second.server.actor is cluster.started[0]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (WELL | {"holds": False}, "it does not see the folder"),
        ({"identity": Lost("no folder", OSError()), "holds": True}, "no folder"),
    ],
    ids=["sees another disk", "raises"],
)
def test_a_node_that_cannot_do_cells_is_an_error(begun, answers, why):
    """It is said with the remedy."""
    _, worker, _ = begun(answers)

    with pytest.raises(ConfigError, match=f"cannot work in .*: {why}; put `output` on"):
        assert not worker.has_ended
