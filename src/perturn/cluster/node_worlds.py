"""Environments on the nodes of a cluster. If a node is lost, its unfinished episodes are played again elsewhere."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from itertools import count
from typing import Any

from perturn.cluster.node_servers import WorldServer
from perturn.cluster.ray_connection import Connection, Lost, Node, Server, check_identity, last_line
from perturn.config.sections import Cluster, Section, Worlds
from perturn.envs.remote_worlds import RemoteWorld, value_of
from perturn.errors import BystanderLost, ConfigError, PerturnError, RunError, check_fit

_logger = logging.getLogger(__name__)

_GRACE_S = 60.0
"""Seconds that a call may exceed all time limits of its environment, before the node counts as lost."""


@dataclass(eq=False)
class _Server(Server):
    """Server of a node's environments; its first call starts an environment."""

    node: Node
    capacity: int = 0
    """Largest number of environments on the node at the same time."""
    open: int = 0
    """Number of environments on the node."""


_ALIVE: weakref.WeakValueDictionary[Any, ClusterWorlds] = weakref.WeakValueDictionary()


def cluster_worlds(section: Section, limits: Worlds, cluster: Cluster, most: int) -> ClusterWorlds:
    """Return the `ClusterWorlds` for these arguments; calls with equal arguments share it as long as it is in use.

    Arguments and errors are the same as of `ClusterWorlds`.
    """
    key = repr((section, limits, cluster, most))
    found = _ALIVE.get(key)
    if found is None:
        found = _ALIVE[key] = ClusterWorlds(section, limits, cluster, most)
    return found


class ClusterWorlds:
    """Makes environments on the nodes of a cluster, each on the least busy node; nodes may join and leave.

    The servers on the nodes end when neither this object nor any of its environments is referenced.
    """

    def __init__(self, section: Section, limits: Worlds, cluster: Cluster, most: int) -> None:
        """Start a first environment on each node, so that wrong settings are found early.

        Args:
            section: Section `environment` of the recipe.
            limits: Time limits, and the number of environments per node.
            cluster: Settings of the cluster.
            most: Largest number of environments that are needed at the same time.

        Raises:
            ConfigError: If there is no cluster, no node has free resources, or installations on nodes differ.
        """
        self.connection = Connection(cluster)
        self.patience = 2 * limits.start_seconds + limits.step_seconds + _GRACE_S
        self._cluster, self._most = cluster, most
        self._numbers = count()
        self._lock = threading.Lock()
        self._living: dict[str, _Server] = {}
        self._coming: list[_Server] = []
        self._refused: set[str] = set()
        self._waited = False
        self.facts: dict[str, Any] = {}
        self._arguments = json.loads(json.dumps(_everywhere(section), default=str)), limits
        try:
            self._first()
        except BaseException:
            for server in (*self._living.values(), *self._coming):
                self.connection.end(server)
            raise

    def __call__(self) -> RemoteWorld:
        """Return an environment; it gets a node when its first episode starts."""
        return RemoteWorld(_OnNode(self))

    def capacity(self, wanted: int) -> int:
        """Return how many environments may be open at the same time on the current nodes, at most `wanted`."""
        return max(1, min(wanted, sum(server.capacity for server in self._living.values())))

    def enter(self) -> tuple[_Server, int]:
        """Return the least busy server, and the number of a new slot for an environment.

        Raises:
            RunError: If there is no node, and no node joins within `cluster.wait_seconds`.
        """
        with self._lock:
            self._look(0)
            until = time.monotonic() + (0 if self._waited else self._cluster.wait_seconds)
            while not self._living:
                if time.monotonic() > until:
                    self._waited = True
                    raise RunError(
                        f"no node of the cluster has room for worlds (cluster.world_cpus={self._cluster.world_cpus:g}) "
                        f"after {self._cluster.wait_seconds:g} s (cluster.wait_seconds); what was recorded is kept: "
                        "start nodes, and the same command goes on."
                    )
                self._look(1.0)
            self._waited = False
            server = min(self._living.values(), key=lambda server: server.open / server.capacity)
            server.open += 1
            return server, next(self._numbers)

    def leave(self, server: _Server) -> None:
        """Record that an environment of the server was closed."""
        with self._lock:
            server.open -= 1

    def lose(self, server: _Server, error: Lost) -> None:
        """Drop a lost server; if its node is alive, the node gets a new server later."""
        with self._lock:
            if self._living.get(server.node.id) is server:
                del self._living[server.node.id]
                _logger.warning("%s lost its worlds: %s", server.node, error)
        self.connection.end(server)

    def _first(self) -> None:
        """Wait for the servers of all nodes, up to the time limit.

        Raises:
            ConfigError: If a server is unusable, or no server has started.
        """
        cpus = self._cluster.world_cpus
        self.connection.require_node(f"cluster.world_cpus={cpus:g} CPUs", cpus)
        self._ask()
        until = time.monotonic() + self._cluster.wait_seconds
        while self.connection.are_coming(self._coming, until):
            self._admit(0.5, strict=True)
        for server in self._coming:
            _logger.warning("%s has no room for worlds yet; going on without it", server.node)
        if not self._living:
            raise ConfigError(
                f"no node of the cluster had room for worlds (cluster.world_cpus={cpus:g}) within "
                f"{self._cluster.wait_seconds:g} s; free some, lower it, or raise cluster.wait_seconds."
            )

    def _look(self, seconds: float) -> None:
        """Start servers on nodes that have none, and wait up to `seconds` for a server."""
        with self.connection.reached():
            self._ask()
        if self._coming:
            self._admit(seconds, strict=False)
        elif not self._living:
            time.sleep(seconds)

    def _ask(self) -> None:
        """Request a server on each node that has none, except nodes whose server was unusable."""
        taken = self._living.keys() | {server.node.id for server in self._coming} | self._refused
        for node in self.connection.nodes():
            if node.id not in taken and node.cpus >= self._cluster.world_cpus:
                actor = self.connection.actor(
                    WorldServer,
                    *self._arguments,
                    node=node,
                    num_cpus=self._cluster.world_cpus,
                    max_concurrency=self._most + 2,
                )
                identity, started = actor.identity.remote(), actor.start.remote(self._most)
                self._coming.append(_Server(actor, identity, started, node))

    def _admit(self, seconds: float, strict: bool) -> None:
        """Wait up to `seconds` for new servers, and use those that have started.

        An unusable server is ended with a warning; if `strict`, its error is raised.
        """
        for server in self.connection.started(self._coming, seconds):
            self._coming.remove(server)
            try:
                check_identity(str(server.node), self.connection.get(server.identity))
                self._note_facts(server)
            except Lost as error:
                if error.cause is not None:  # otherwise the server died
                    said = f"{server.node} cannot load perturn {last_line(error.cause)}; install it there."
                    self._refuse(server, ConfigError(said), strict)
            except PerturnError as error:
                self._refuse(server, error, strict)
            else:
                self._living[server.node.id] = server

    def _note_facts(self, server: _Server) -> None:
        """Record the properties of a server's first environment, which must be equal on all nodes.

        Raises:
            PerturnError: If the environment did not start, or its properties differ from another node's.
        """
        try:
            facts = value_of(self.connection.get(server.started))
        except PerturnError as error:
            raise type(error)(f"{server.node}: {error}") from error
        server.capacity = facts.pop("capacity")
        self.facts = self.facts or facts
        name, must = f"the environment on {server.node}", f"be {self.facts['name']!r}, as on another node"
        check_fit(facts == self.facts, name, must, facts["name"], "Install the same on all nodes.")

    def _refuse(self, server: _Server, error: Exception, strict: bool) -> None:
        self._refused.add(server.node.id)
        self.connection.end(server)
        if strict:
            raise error
        _logger.warning("left out: %s", error)


def _everywhere(section: Section) -> Section:
    """Return the environment's section with an absolute path, if the environment is a Python file."""
    file, colon, attribute = str(section["name"]).rpartition(":")
    return section | {"name": os.path.abspath(file) + colon + attribute} if file.endswith(".py") else section


class _OnNode:
    """A `Link` to an environment on a node. If the node is lost during a call, the call raises `BystanderLost`."""

    def __init__(self, worlds: ClusterWorlds) -> None:
        self._worlds = worlds
        self._slot: tuple[_Server, int] | None = None
        self.facts = worlds.facts

    def call(self, method: str, *arguments: Any) -> Any:
        if self._slot is None:
            self._slot = self._worlds.enter()
        server, number = self._slot
        return value_of(self._get(server, server.actor.call.remote(number, method, *arguments), method))

    def close(self) -> None:
        if self._slot is None:
            return
        server, number = self._slot
        try:
            value_of(self._get(server, server.actor.close.remote(number), "close"))
        except BystanderLost:
            return
        finally:
            self._slot = None
            self._worlds.leave(server)

    def _get(self, server: _Server, reply: Any, what: str) -> Any:
        """Wait for a reply and return it.

        Raises:
            BystanderLost: If the server is lost.
        """
        try:
            return self._worlds.connection.get(reply, self._worlds.patience)
        except Lost as error:
            self._slot = None
            self._worlds.lose(server, error)
            raise BystanderLost(f"{server.node} was lost in {what}: {error}") from error
