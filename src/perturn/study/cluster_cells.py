"""Run cells on the nodes of a Ray cluster. Every node must see the study's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from perturn.cluster.ray_connection import Connection, Lost, Server, check_identity, identity
from perturn.config.sections import Cluster
from perturn.errors import ConfigError
from perturn.study.cell_processes import do_logged
from perturn.study.cells import Cell
from perturn.study.stage_sharing import Sources

_PROBE = "seen"
"""Text of a file by which a node shows that it sees the study's folder; the name of the file is unique."""
_TRIES = 2
"""Number of attempts at a cell whose node is lost each time."""


class CellServer:
    """Actor on a node that runs cells, one at a time."""

    def __init__(self, folder: str) -> None:
        """Change to the folder where the study was started."""
        os.chdir(folder)

    def identity(self) -> str:
        """Return the identity of the installed perturn."""
        return identity()

    def holds(self, file: str, text: str) -> bool:
        """Return whether the content of a file is the given text."""
        path = Path(file)
        return path.is_file() and path.read_text(encoding="utf-8") == text

    def work(self, cell: Cell, sources: Sources, test: bool, threads: int, log: str) -> str | None:
        """Run a cell. Return its error, or None."""
        return do_logged(cell, sources, test, threads, log)


class Nodes:
    """Nodes of a cluster. A cell takes the resources of one engine replica: `engine_cpus` and `engine_gpus`."""

    def __init__(self, cluster: Cluster, folder: Path, most: int | None) -> None:
        """Connect to the cluster.

        Args:
            cluster: The cluster.
            folder: Folder of the study, which the nodes must see too.
            most: Maximum number of cells at the same time. If None, the resources of the nodes limit it.

        Raises:
            ConfigError: If no node has the resources of a cell.
        """
        self.connection, self._cluster, self._folder, self._most = Connection(cluster), cluster, folder, most
        size = f"cluster.engine_cpus={cluster.engine_cpus:g} CPUs and cluster.engine_gpus={cluster.engine_gpus:g} GPUs"
        self.connection.require_node(size, cluster.engine_cpus, cluster.engine_gpus)
        self._idle: list[Server] = []
        self._probe = folder / f".{uuid4().hex}"

    def most(self, peak_gb: float) -> int:
        """Return the number of cells that may run at the same time. The memory of the nodes is not considered."""
        cpus, gpus = self._cluster.engine_cpus, self._cluster.engine_gpus
        held = [
            min(node.cpus // max(cpus, 1e-9), node.gpus // gpus if gpus else 1e9)
            for node in self.connection.nodes()
        ]
        return max(1, min(int(sum(held)), self._most or 10**9))

    def start(self, cell: Cell, sources: Sources, test: bool, log: Path) -> NodeWorker:
        """Start a cell on a node."""
        threads = max(1, round(self._cluster.engine_cpus))
        return NodeWorker(self, cell, (cell, sources, test, threads, str(log.absolute())))

    def server(self) -> Server:
        """Return an idle server, or start a new server without waiting for it; see `check`."""
        if self._idle:
            return self._idle.pop()
        self._probe.write_text(_PROBE, encoding="utf-8")
        need: dict[str, Any] = {"num_cpus": self._cluster.engine_cpus, "num_gpus": self._cluster.engine_gpus}
        actor = self.connection.actor(CellServer, os.getcwd(), **need)
        return Server(actor, actor.identity.remote(), actor.holds.remote(str(self._probe), _PROBE))

    def idle_instead(self, server: Server) -> Server:
        """Return the server, or an idle server instead of a server that still waits for room on a node."""
        if not self._idle or self.connection.ready([server.started]):
            return server
        self.connection.end(server)
        return self._idle.pop()

    def check(self, server: Server) -> None:
        """Check a server that has started.

        Raises:
            ConfigError: If the node has another version of perturn, or does not see the study's folder.
            Lost: If the node is lost.
        """
        try:
            check_identity("a node of the cluster", self.connection.get(server.identity))
            why = "" if self.connection.get(server.started) else "it does not see the folder"
        except Lost as error:
            if error.cause is None:
                raise
            why = str(error)
        if why:
            raise ConfigError(
                f"a node of the cluster cannot work in {self._folder.absolute()}: {why}; put `output` on a file system "
                "that all nodes have under that path, or leave `cluster` out."
            )

    def release(self, server: Server) -> None:
        """Mark a server as idle."""
        self._idle.append(server)

    def wait(self, workers: Iterable[NodeWorker], seconds: float) -> None:
        """Wait until one of the workers has ended, at most this number of seconds."""
        self.connection.ready([worker.reply for worker in workers], seconds)

    def end_idle(self) -> None:
        """End all idle servers."""
        for server in self._idle:
            self.connection.end(server)
        self._idle = []

    def close(self) -> None:
        """End all idle servers, and remove the file that shows the folder."""
        self.end_idle()
        self._probe.unlink(missing_ok=True)


@dataclass(eq=False)
class NodeWorker:
    """One cell on a node."""

    nodes: Nodes
    cell: Cell
    work: tuple[Any, ...]
    began: float = field(default_factory=time.monotonic)
    tries: int = 0

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.tries += 1
        self._is_working = False
        self.server = self.nodes.server()
        self.reply = self.server.started

    @property
    def has_ended(self) -> bool:
        """Whether the cell has ended. A cell whose node is lost is started once more.

        Raises:
            ConfigError: If the node cannot do cells of this study.
        """
        if not self._is_working:
            self.server = self.nodes.idle_instead(self.server)
            self.reply = self.server.started
        if not self.nodes.connection.ready([self.reply]):
            return False
        try:
            if not self._is_working:
                self.nodes.check(self.server)
                self._is_working, self.reply = True, self.server.actor.work.remote(*self.work)
                return False
            self._error: str | None = self.nodes.connection.get(self.reply)
            self.nodes.release(self.server)
        except Lost as error:
            self._error = f"its process on a node was lost: {error}"
            self.nodes.connection.end(self.server)
            self.nodes.end_idle()  # some may have been on the lost node
            if error.cause is None and self.tries < _TRIES:
                self._begin()
                return False
        return True

    def error(self) -> str | None:
        """Return the error of a cell that has ended; None if it succeeded."""
        return self._error

    def stop(self) -> None:
        """End the server of the cell. The results of finished stages are on disk."""
        self.nodes.connection.end(self.server)

    def end(self) -> None:
        """Do nothing, since `stop` ends the worker immediately."""
