"""The connection to a Ray cluster, and what its nodes are."""

from __future__ import annotations

import hashlib
import importlib
import logging
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from perturn.errors import ConfigError, RunError
from perturn.settings.cluster import Cluster

_CONNECT_S = 5.0
"""Seconds that a machine may take to accept a connection."""


def connect(settings: Cluster) -> Any:
    """Ray, connected to a cluster; where this process is connected already, that cluster is taken.

    What is printed on the nodes stays in Ray's logs there.

    Raises:
        ConfigError: If Ray is missing, or no cluster answers at the address; within seconds where nothing listens.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError('cluster needs ray; run: pip install "perturn[ray]"') from None
    if ray.is_initialized():
        return ray
    _knock(settings.address)
    try:
        ray.init(settings.address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"cluster.address {settings.address!r}: Ray cannot connect: {type(error).__name__}: {reason}"
        ) from error
    return ray


def _knock(address: str) -> None:
    """See whether anything listens there: Ray itself would try for half a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address {address!r}: nothing answers there ({error}); correct it, or start the cluster: "
            "ray start --head --ray-client-server-port=10001 on one machine, ray start --address=HEAD:6379 on others."
        ) from error


@dataclass(frozen=True)
class Node:
    """A node that is alive."""

    id: str
    host: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"node {self.host} ({self.id[:8]})"


def nodes(ray: Any) -> list[Node]:
    """The nodes that are alive and have processors to give: one started with none is not meant to work."""
    found = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return [node for node in found if node.cpus > 0]


def on_node(node: Node) -> Any:
    """Ray's strategy that puts something on a node or nowhere."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)


def losses(ray: Any) -> tuple[type[Exception], ...]:
    """Exceptions of a call whose node, process or cluster is gone, or that did not end in time."""
    return ray.exceptions.RayError, ConnectionError


@contextmanager
def reached(ray: Any) -> Iterator[None]:
    """Around what has to reach the cluster.

    Raises:
        RunError: If that is gone.
    """
    try:
        yield
    except losses(ray) as error:
        raise RunError(
            f"the cluster is gone: {last_line(error)}; what was recorded is kept: the same command goes on."
        ) from error


def cause(ray: Any, error: Exception) -> Exception | None:
    """The exception of the called code; None if the call was lost."""
    if isinstance(error, ray.exceptions.RayTaskError):
        inner = getattr(error, "cause", None)
        return inner if isinstance(inner, Exception) else error
    if "creation task" in str(error):  # what it is made of cannot be loaded there
        return error
    return None


def last_line(error: BaseException) -> str:
    """An error in one line; of a traceback its end, of Ray's reports their gist."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = [
        line for line in lines if line.startswith(("The actor died because", "The actor's node", "The node"))
    ]
    return f"{type(error).__name__}: {(said or lines[-1:])[0]:.300}"


@cache
def identity() -> str:
    """Which perturn this is: equal texts are equal code under the same Python."""
    digest = hashlib.blake2b(digest_size=4)
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    version = sys.modules["perturn"].__version__
    return f"{version} (source {digest.hexdigest()}, Python {platform.python_version()})"


def check_identity(where: str, theirs: str) -> None:
    """Refuse another perturn than that of this process.

    Args:
        where: Where it is.
        theirs: Its identity.

    Raises:
        ConfigError: Naming both.
    """
    if theirs != identity():
        raise ConfigError(
            f"{where} has perturn {theirs}, and this process has {identity()}; install the same on all machines."
        )
