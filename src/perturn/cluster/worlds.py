"""Worlds on the nodes of a cluster. A node's worlds are lost with it: their episodes are played again elsewhere."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from perturn.cluster.connect import (
    Node,
    cause,
    check_identity,
    connect,
    last_line,
    losses,
    nodes,
    on_node,
    reached,
)
from perturn.cluster.servers import WorldServer
from perturn.envs.process import observation_of, plain_task, value_of
from perturn.errors import BystanderLost, ConfigError, EnvironmentFailure, PerturnError, RunError
from perturn.settings.cluster import Cluster
from perturn.settings.recipe import Section, Worlds
from perturn.types import Observation, Task

_logger = logging.getLogger(__name__)

_GRACE_S = 60.0
"""Seconds that a call may take beyond all limits of its world, before the node counts as lost."""


@dataclass(eq=False)
class _House:
    """A node that serves worlds."""

    node: Node
    server: Any
    placed: Any
    """Reference to its identity: it is there once the server runs."""
    started: Any
    """Reference to what its first world says of itself."""
    room: int = 0
    """Worlds that it has room for."""
    open: int = 0
    """Worlds that live there."""


_ALIVE: weakref.WeakValueDictionary[Any, ClusterWorlds] = weakref.WeakValueDictionary()


def cluster_worlds(section: Section, limits: Worlds, cluster: Cluster, most: int) -> ClusterWorlds:
    """What makes worlds on a cluster; while it or a world of it is in use, the same one.

    Its arguments and errors are those of `ClusterWorlds`.
    """
    key = repr((section, limits, cluster, most))
    found = _ALIVE.get(key)
    if found is None:
        found = _ALIVE[key] = ClusterWorlds(section, limits, cluster, most)
    return found


class ClusterWorlds:
    """Makes worlds on the nodes of a cluster, each on the node that has most room; nodes may come and go.

    Its servers end when nothing refers to it or to a world of it.
    """

    def __init__(self, section: Section, limits: Worlds, cluster: Cluster, most: int) -> None:
        """Start a first world on each node, so that a wrong setting shows.

        Args:
            section: Section `environment` of the recipe.
            limits: Time limits, and worlds alive at a time on a node.
            cluster: The cluster.
            most: Worlds wanted at a time.

        Raises:
            ConfigError: If there is no cluster, no node has room, or a node has another version of something.
        """
        self.ray = connect(cluster)
        self.losses = losses(self.ray)
        self.patience = 2 * limits.start_seconds + limits.step_seconds + _GRACE_S
        self._cluster, self._most = cluster, most
        self._numbers = count()
        self._lock = threading.Lock()
        self._living: dict[str, _House] = {}
        self._coming: list[_House] = []
        self._refused: set[str] = set()
        self._waited = False
        self.facts: dict[str, Any] = {}
        actor = self.ray.remote(WorldServer)
        self._serve = partial(actor.options, num_cpus=cluster.world_cpus, max_concurrency=most + 2)
        self._arguments = json.loads(json.dumps(_everywhere(section), default=str)), limits
        try:
            self._first()
        except BaseException:
            for house in (*self._living.values(), *self._coming):
                self._end(house)
            raise

    def __call__(self) -> ClusterWorld:
        """A world; it moves to a node with its first episode."""
        return ClusterWorld(self)

    def room(self, wanted: int) -> int:
        """How many of so many worlds may be alive at a time on the nodes that are there now."""
        return max(1, min(wanted, sum(house.room for house in self._living.values())))

    def enter(self) -> tuple[_House, int]:
        """A house with room, and a number for the room.

        Raises:
            RunError: If no node is left, and none comes.
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
            house = min(self._living.values(), key=lambda house: house.open / house.room)
            house.open += 1
            return house, next(self._numbers)

    def leave(self, house: _House) -> None:
        """A world in the house has closed."""
        with self._lock:
            house.open -= 1

    def lose(self, house: _House, error: Exception) -> None:
        """Give a house up; its node gets another if it lives."""
        with self._lock:
            if self._living.get(house.node.id) is house:
                del self._living[house.node.id]
                _logger.warning("%s lost its worlds: %s", house.node, last_line(error))
        self._end(house)

    def _end(self, house: _House) -> None:
        with suppress(*self.losses):
            self.ray.kill(house.server)

    def _first(self) -> None:
        """Wait for all nodes; the first to refuse, or to differ, stops the run before it begins."""
        self._build()
        if not self._coming:
            seen = ", ".join(f"{node.host}: {node.cpus:g}" for node in nodes(self.ray)) or "none has any"
            raise ConfigError(
                f"no node of the cluster has cluster.world_cpus={self._cluster.world_cpus:g} CPUs ({seen})."
            )
        until = time.monotonic() + self._cluster.wait_seconds
        while self._coming and (time.monotonic() < until or self._starting()):
            self._admit(0.5, strict=True)
        for house in self._coming:
            _logger.warning("%s has no room for worlds yet; going on without it", house.node)
        if not self._living:
            raise ConfigError(
                f"no node of the cluster had room for worlds (cluster.world_cpus={self._cluster.world_cpus:g}) "
                f"within {self._cluster.wait_seconds:g} s; free some, lower it, or raise cluster.wait_seconds."
            )

    def _starting(self) -> bool:
        """Whether some server runs whose first world has yet to start."""
        return bool(self.ray.wait([house.placed for house in self._coming], timeout=0)[0])

    def _look(self, seconds: float) -> None:
        """Take in nodes that are new or back.

        Raises:
            RunError: If the cluster is gone.
        """
        with reached(self.ray):
            self._build()
        if self._coming:
            self._admit(seconds, strict=False)
        elif not self._living:
            time.sleep(seconds)

    def _build(self) -> None:
        """Ask for a house on each node that has none."""
        taken = self._living.keys() | {house.node.id for house in self._coming} | self._refused
        for node in nodes(self.ray):
            if node.id not in taken and node.cpus >= self._cluster.world_cpus:
                server = self._serve(scheduling_strategy=on_node(node)).remote(*self._arguments)
                placed, started = server.identity.remote(), server.start.remote(self._most)
                self._coming.append(_House(node, server, placed, started))

    def _admit(self, seconds: float, strict: bool) -> None:
        """Take in the houses that are ready in time.

        Args:
            seconds: How long to wait.
            strict: Whether one that cannot be used is an error, rather than left out with a warning.
        """
        ready, _ = self.ray.wait([house.started for house in self._coming], timeout=seconds)
        for house in [house for house in self._coming if house.started in ready]:
            self._coming.remove(house)
            try:
                check_identity(str(house.node), self.ray.get(house.placed))
                self._furnish(house)
            except self.losses as error:
                reason = cause(self.ray, error)
                if reason is None:  # it died again
                    continue
                self._refuse(
                    house,
                    ConfigError(f"{house.node} cannot load perturn {last_line(reason)}; install it there."),
                    strict,
                )
            except PerturnError as error:
                self._refuse(house, error, strict)
            else:
                self._living[house.node.id] = house

    def _furnish(self, house: _House) -> None:
        """Note what its first world says, in which all nodes should agree."""
        try:
            facts = value_of(self.ray.get(house.started))
        except PerturnError as error:
            raise type(error)(f"{house.node}: {error}") from error
        house.room = facts.pop("room")
        self.facts = self.facts or facts
        if facts != self.facts:
            raise ConfigError(
                f"{house.node} has {facts['name']!r}, another node {self.facts['name']!r}; install the same on all."
            )

    def _refuse(self, house: _House, error: Exception, strict: bool) -> None:
        self._refused.add(house.node.id)
        self._end(house)
        if strict:
            raise error
        _logger.warning("left out: %s", error)


def _everywhere(section: Section) -> Section:
    """The section with a path that does not depend on the current folder."""
    file, colon, attribute = str(section["name"]).rpartition(":")
    return section | {"name": os.path.abspath(file) + colon + attribute} if file.endswith(".py") else section


class ClusterWorld:
    """An environment on some node, as an `Environment`; it has `expert` if the environment has.

    If its node is lost, that call raises `BystanderLost`, and the next `reset` begins on another. Not to be called from
    two threads at once.
    """

    def __init__(self, worlds: ClusterWorlds) -> None:
        self._worlds = worlds
        self._place: tuple[_House, int] | None = None
        self.name: str = worlds.facts["name"]

    def __getattr__(self, name: str) -> Any:
        if name in ("expert", "demonstration") and self._worlds.facts[name]:
            return getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split."""
        return [Task(**task) for task in self._call("tasks", split)]

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode."""
        return observation_of(self._call("reset", plain_task(task), seed))

    def step(self, action: str) -> Observation:
        """Take one action."""
        if self._place is None:
            raise EnvironmentFailure("no episode is running: call reset before step.")
        return observation_of(self._call("step", action))

    def close(self) -> None:
        """End the world. It may be used again."""
        if self._place is not None:
            house, number = self._place
            try:
                value_of(self._get(house.server.close.remote(number), "close"))
            except BystanderLost:
                return
            finally:
                self._place = None
                self._worlds.leave(house)

    def _expert(self, task: Task) -> Sequence[str]:
        actions: list[str] = self._call("expert", plain_task(task))
        return actions

    def _demonstration(self, task: Task) -> Sequence[tuple[str, str]]:
        return [(thought, action) for thought, action in self._call("demonstration", plain_task(task))]

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._place is None:
            self._place = self._worlds.enter()
        house, number = self._place
        return value_of(self._get(house.server.call.remote(number, method, *arguments), method))

    def _get(self, reply: Any, what: str) -> Any:
        """Wait for a reply.

        Raises:
            BystanderLost: If the node is gone.
        """
        assert self._place is not None
        house, _ = self._place
        try:
            return self._worlds.ray.get(reply, timeout=self._worlds.patience)
        except self._worlds.losses as error:
            self._place = None
            self._worlds.lose(house, error)
            raise BystanderLost(f"{house.node} was lost in {what}: {last_line(error)}") from error
