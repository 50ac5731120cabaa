"""Connection to a Ray cluster: its nodes, actors and calls."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from perturn.config.sections import Cluster
from perturn.errors import ConfigError, RunError, check_fit, within
from perturn.table import guarded, require_library

_CONNECT_S = 5.0
"""Time limit in seconds for a machine to accept a connection."""
HEAD_S = 40.0
"""Time in seconds after which a head that does not answer counts as lost. After 60 s, Ray ends the process itself."""
LOOK_S = 2.0
"""Time in seconds between two checks of the head."""


@dataclass(frozen=True)
class Node:
    """A live node of the cluster."""

    id: str
    host: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"node {self.host} ({self.id[:8]})"


@dataclass(eq=False)
class Server:
    """An actor on a node, with references that show its progress."""

    actor: Any
    identity: Any
    """Reference to the actor's identity, which is available once the actor runs."""
    started: Any
    """Reference to the result of the actor's first call, which is available once the call has ended."""


class Lost(Exception):
    """Raised if a call failed. `cause` is the exception of the called code; None: the actor died or was too slow."""

    def __init__(self, said: str, cause: Exception | None) -> None:
        super().__init__(said)
        self.cause = cause


class Connection:
    """Connection to a Ray cluster. If the process is already connected, the existing connection is used.

    Output of the nodes stays in Ray's logs on the nodes.
    """

    def __init__(self, settings: Cluster) -> None:
        """Connect to the cluster; if nothing listens at the address, fail within seconds.

        Raises:
            ConfigError: If Ray is missing, or no cluster answers at the address.
        """
        require_library("ray", "cluster", "ray")
        self._ray: Any = importlib.import_module("ray")
        self._losses = self._ray.exceptions.RayError, ConnectionError
        if self._ray.is_initialized():
            return
        _knock(settings.address)
        token = (
            ". If the cluster asks for a token, this machine needs the token too, and RAY_AUTH_MODE=token."
        )
        with guarded(f"cluster.address {settings.address!r}: Ray cannot connect", token):
            self._ray.init(settings.address, log_to_driver=False, logging_level=logging.ERROR)
        if not settings.address.startswith("ray://"):  # Ray's client reports a lost cluster itself
            Thread(target=_end_without_head, args=(self._ray,), daemon=True).start()

    def nodes(self) -> list[Node]:
        """Return the live nodes with CPUs; a node that was started with 0 CPUs gets no work."""
        found = [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return [node for node in found if node.cpus > 0]

    def require_node(self, what: str, cpus: float, gpus: float = 0.0) -> None:
        """Raise a `ConfigError` if no node has the given numbers of CPUs and GPUs.

        Args:
            what: The requested resources in words, for the message.
            cpus: Number of CPUs.
            gpus: Number of GPUs.
        """
        there = self.nodes()
        if not any(node.cpus >= cpus and node.gpus >= gpus for node in there):
            sizes = (
                f"{node.host}: {node.cpus:g}" + (f" and {node.gpus:g}" if gpus else "") for node in there
            )
            raise ConfigError(f"no node of the cluster has {what} ({', '.join(sizes) or 'none has any'}).")

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Report a lost cluster as a `RunError`, for calls inside this context."""
        try:
            yield
        except self._losses as error:
            raise RunError(
                f"the cluster is gone: {last_line(error)}; what was recorded is kept: the same command goes on."
            ) from error

    def actor(self, kind: type, *arguments: Any, node: Node | None = None, **options: Any) -> Any:
        """Request an actor and return its handle; the actor starts once its resources are free.

        Args:
            kind: Class of the actor.
            arguments: Arguments of its constructor.
            node: Node of the actor; None: any node with free resources, spread over the nodes.
            options: Ray's options of the actor.
        """
        where: Any = "SPREAD"
        if node is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            where = strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        return self._ray.remote(kind).options(scheduling_strategy=where, **options).remote(*arguments)

    def put(self, data: Any) -> Any:
        """Put data into Ray's object store, and return a reference."""
        return self._ray.put(data)

    def ready(self, references: Sequence[Any], seconds: float = 0.0) -> list[Any]:
        """Wait up to `seconds` for a first reference to become available; return all that are then available."""
        if not references:
            return []
        first, _ = self._ray.wait(list(references), timeout=seconds)
        if not first or len(references) == 1:
            return list(first)
        found, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        return list(found)

    def started(self, coming: Sequence[Server], seconds: float) -> list[Any]:
        """Wait up to `seconds` for a first server to start; return all servers that have then started."""
        ready = self.ready([server.started for server in coming], seconds)
        return [server for server in coming if server.started in ready]

    def are_coming(self, coming: Sequence[Server], until: float) -> bool:
        """Return whether to keep waiting for servers: until a time, or longer if an actor already runs.

        Args:
            coming: Servers that have not started.
            until: End of the wait, by `time.monotonic`.
        """
        return bool(coming) and (
            time.monotonic() < until or bool(self.ready([server.identity for server in coming]))
        )

    def get(self, reference: Any, seconds: float | None = None) -> Any:
        """Wait for the result of a call and return it.

        Args:
            reference: Reference to the result.
            seconds: Time limit in seconds; None: no limit.

        Raises:
            Lost: If the call raised an exception, the actor died, or the time limit passed.
        """
        try:
            return self._ray.get(reference, timeout=seconds)
        except self._losses as error:
            cause: Exception | None = None
            if isinstance(error, self._ray.exceptions.RayTaskError):
                inner = getattr(error, "cause", None)
                cause = inner if isinstance(inner, Exception) else error
            elif "creation task" in str(error):  # the actor's class cannot be loaded on the node
                cause = error
            raise Lost(last_line(error), cause) from error

    def tell(self, method: Any, *arguments: Any) -> None:
        """Call a method of an actor without waiting for the result; a dead actor is ignored."""
        with suppress(*self._losses):
            method.remote(*arguments)

    def end(self, server: Server) -> None:
        """End a server; a dead server is ignored."""
        with suppress(*self._losses):
            self._ray.kill(server.actor)


def _end_without_head(ray: Any) -> None:
    """End this process with an error if the head of the cluster is lost.

    Without a head, calls of Ray block outside Python, where no exception reaches them. After a minute Ray ends the
    process, and its message does not say what to do.
    """

    def address() -> str | None:
        # Between the two calls, the main thread may leave the cluster.
        with suppress(AttributeError, RuntimeError):
            return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else None
        return None

    lost = lost_head(address)
    if lost is not None:
        print(f"error: {lost}", file=sys.stderr, flush=True)
        os._exit(2)


def lost_head(address: Callable[[], str | None]) -> str | None:
    """Wait until the head of a cluster, which has answered before, has not answered for `HEAD_S`.

    Args:
        address: Returns the head's HOST:PORT; None if this process has left the cluster.

    Returns:
        The error to tell the user; None if this process has left the cluster.
    """
    answered = None  # a head that never answers may be hidden by a firewall, and Ray may still reach it
    while (where := address()) is not None:
        host, _, port = where.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            answered = time.monotonic()
        if answered is not None and time.monotonic() > answered + HEAD_S:
            return (
                f"the cluster is lost: its head at {where} has not answered for {HEAD_S:.0f} s. Finished stages and "
                "recorded episodes are kept. Start the head again, unless Perturn had started it, and run the same "
                "command again."
            )
        time.sleep(LOOK_S)
    return None


def _knock(address: str) -> None:
    """Raise a `ConfigError` if nothing listens at an address; Ray itself would keep trying for half a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    start = (
        "); correct it, or start the cluster: ray start --head --ray-client-server-port=10001 on one machine, "
        "ray start --address=HEAD:6379 on others."
    )
    where = f"cluster.address {address!r}: nothing answers there ("
    with within(where, OSError, OverflowError, after=start):
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def last_line(error: BaseException) -> str:
    """Return an error's type and text in one line: the last line of a traceback, or the reason in Ray's report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = [
        line for line in lines if line.startswith(("The actor died because", "The actor's node", "The node"))
    ]
    return f"{type(error).__name__}: {(said or lines[-1:])[0]:.300}"


@cache
def identity() -> str:
    """Return a text that identifies this installation: version, hash of the source, and Python version."""
    digest = hashlib.blake2b(digest_size=4)
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    version = sys.modules["perturn"].__version__
    return f"{version} (source {digest.hexdigest()}, Python {platform.python_version()})"


def check_identity(where: str, theirs: str) -> None:
    """Raise a `ConfigError` if another process's installation differs from this process's installation.

    Args:
        where: Name of the other process, for the message.
        theirs: Result of `identity` in the other process.
    """
    ours, remedy = identity(), "Install the same on all machines."
    check_fit(theirs == ours, f"perturn of {where}", f"be {ours}, as in this process", theirs, remedy)
