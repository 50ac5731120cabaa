"""What cannot work on a cluster is refused before work."""

import shutil
import sys
from pathlib import Path

import pytest

from cluster.nodes import WARNINGS, Script, broken
from perturn.cluster import ClusterWorlds, Replicas
from perturn.cluster.ray_connection import Connection
from perturn.config.parsing import parse
from perturn.config.sections import Cluster, Worlds
from perturn.errors import ConfigError, EnvironmentFailure, ModelError, RunError
from support.ports import free_port

pytest.importorskip("ray", reason='needs pip install "perturn[ray]"')
pytestmark = WARNINGS

PACKAGE = Path(sys.modules["perturn"].__file__).parent


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"address": "somewhere"}, "address must be ray://host:port"),
        ({"address": "auto", "engines": -1}, "engines must be >= 0"),
        ({"address": "auto", "replicas": 1}, "unknown key 'cluster.replicas'"),
    ],
)
def test_a_wrong_setting_is_refused(setting, says):
    """Before anything is looked for."""
    with pytest.raises(ConfigError) as caught:
        parse(Cluster, setting, "cluster")

    assert says in str(caught.value)


@pytest.mark.parametrize(
    "address", ["ray://127.0.0.1:{}", "127.0.0.1:{}", "ray://no-such-machine.invalid:{}"]
)
def test_an_address_where_nothing_listens_is_refused_at_once(address):
    """Ray itself would try for half a minute and more."""
    with pytest.raises(ConfigError, match="nothing answers there"):
        Connection(Cluster(address.format(free_port())))


def test_ray_is_asked_for_where_it_is_missing(monkeypatch):
    """By the command that installs it."""
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r'pip install "perturn\[ray\]"'):
        Connection(Cluster("auto"))


@pytest.mark.cluster
def test_what_cannot_work_is_refused_before_work(nodes, steps):
    """Sizes that no node has, nodes that are full, worlds and models that cannot start."""
    section, _ = steps
    nodes.add(1)
    cluster, impatient = Cluster(nodes.address), Cluster(nodes.address, engine_cpus=2, wait_seconds=2)

    with pytest.raises(ConfigError, match=r"no node of the cluster has cluster.world_cpus=64 CPUs \(.*: 2\)"):
        ClusterWorlds(section, Worlds(), Cluster(nodes.address, world_cpus=64), 4)
    with pytest.raises(ConfigError, match=r"no node of the cluster has .* cluster.engine_gpus=1 GPUs"):
        Replicas(Cluster(nodes.address, engine_gpus=1), Script, "none")
    with pytest.raises(ConfigError, match=r"unknown key 'environment.traces'"):
        ClusterWorlds(section | {"traces": 1}, Worlds(), cluster, 4)
    with pytest.raises(EnvironmentFailure, match=r"node .*: the environment's name must be a text"):
        ClusterWorlds({"name": section["name"].replace(":Steps", ":Nameless")}, Worlds(), cluster, 4)
    with pytest.raises(ModelError, match="no model none"):
        Replicas(cluster, broken, "none")
    worlds = ClusterWorlds(section, Worlds(), cluster, 4)
    with pytest.raises(RunError, match="no replica of the policy has room"):
        Replicas(impatient, Script, "none")
    assert worlds.capacity(4) >= 1


@pytest.mark.cluster
def test_a_node_with_another_perturn_is_refused(nodes, steps, tmp_path):
    """Both versions are named; a node without any says what is missing."""
    section, _ = steps
    shutil.copytree(PACKAGE, tmp_path / "other" / "perturn")
    init = tmp_path / "other/perturn/__init__.py"
    init.write_text(init.read_text().replace("__version__ =", '__version__ = "0.0.9"  #'))
    nodes.add(1, env_vars={"PYTHONPATH": str(tmp_path / "other")})

    with pytest.raises(
        ConfigError, match=r"^perturn of .* got '0\.0\.9 \(source .*Install the same on all machines"
    ):
        ClusterWorlds(section, Worlds(), Cluster(nodes.address), 4)
    with pytest.raises(ConfigError, match=r"perturn of replica 0 of the policy on .* got '0\.0\.9"):
        Replicas(Cluster(nodes.address), Script, "none")
