"""An engine made of replicas of the policy on the nodes of a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from perturn.cluster.node_servers import EngineServer
from perturn.cluster.ray_connection import Connection, Lost, Server, check_identity, last_line
from perturn.config.sections import Cluster
from perturn.engines.streaming import answer_all, home_of, refuse_update
from perturn.errors import EngineFailure, PerturnError, RunError, check_fit
from perturn.types import Action, Engine, Prompt, Sampling

_logger = logging.getLogger(__name__)

_MODEL_FILES = {".safetensors", ".json", ".jinja", ".txt", ".model"}
"""Suffixes of a model's files that are sent to the nodes."""
_MOMENT_S = 0.003
"""Seconds that `advance` waits for an answer, before it sends newer prompts."""
_POLL_S = 10.0
"""Seconds after which a replica replies to a request for answers, even if it has none."""
_LOSSES_IN_A_ROW = 16
"""Largest number of replicas that may be lost without an answer in between; more losses end the run."""


@dataclass(eq=False)
class _Replica(Server):
    """A replica of the policy."""

    number: int
    gone: bool = False
    asked: dict[int, tuple[Prompt, Sampling]] = field(default_factory=dict)
    """Prompts that the replica is answering, by their number."""
    poll: Any = None
    """Reference to the replica's next answers; None: no answers are requested."""


class Replicas:
    """A streaming engine whose replicas answer different conversations independently.

    A prompt is sent to its replica at once, and joins the running batch there. A conversation stays with one replica,
    which caches its keys and values. If a replica is lost, its conversations move to other replicas, and a new replica
    is started on any node with free resources.
    """

    def __init__(self, cluster: Cluster, serve: Callable[[str], Engine], model: str) -> None:
        """Start the replicas, and wait for them up to `cluster.wait_seconds`.

        Args:
            cluster: Settings of the cluster.
            serve: Function that opens the engine of a model on a node; the node must be able to import it.
            model: A folder, whose files are sent through Ray, or a Hub id, which each node loads itself.

        Raises:
            PerturnError: If no node has free resources for a replica, or a replica cannot load the model.
        """
        self._cluster = cluster
        self._connection = Connection(cluster)
        size = f"cluster.engine_cpus={cluster.engine_cpus:g} CPUs and cluster.engine_gpus={cluster.engine_gpus:g} GPUs"
        self._connection.require_node(size, cluster.engine_cpus, cluster.engine_gpus)
        self._arguments: tuple[Any, ...] = serve, model, _send(self._connection, model)
        self._started = self._lost = self._numbered = 0
        self._coming: list[_Replica] = []
        self._living: list[_Replica] = []
        self._homes: dict[str, _Replica] = {}
        self._waiting: list[tuple[Prompt, Sampling]] = []
        self._why = ""
        self.name = ""
        try:
            for _ in range(cluster.engines):
                self._start()
            self._wait(cluster.engines)
        except BaseException:
            self.close()
            raise
        for replica in self._coming:
            _logger.warning("replica %d of the policy has no room yet; going on without it", replica.number)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action or failure per prompt, in order; prompts of a lost replica go to other replicas.

        Raises:
            RunError: If no replica is left, or too many replicas are lost in a row.
        """
        return answer_all(self, prompts, sampling)

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Queue prompts; `advance` sends them to replicas and returns their answers."""
        self._waiting += [(prompt, sampling) for prompt in prompts]

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Send waiting prompts to their replicas; return the prompts that were answered, with their answers.

        Raises:
            RunError: If no replica is left, or too many replicas are lost in a row.
        """
        self._admit(0)
        self._wait(1)
        with self._connection.reached():
            self._pass_on()
            asked = {one.poll: one for one in self._living if one.poll is not None}
            ready = self._connection.ready([*asked], _MOMENT_S)
        answered: list[tuple[Prompt, Action | EngineFailure]] = []
        for reply in ready:
            replica = asked[reply]
            replica.poll = None
            for number, answer in self._hear(replica, reply) or ():
                answered.append((replica.asked.pop(number)[0], answer))
                self._lost = 0
        return answered

    def update_weights(self, folder: str | Path, name: str) -> None:
        """Replace the weights of all replicas by other weights of the same model.

        A replica that is lost during the update is started again with the new weights.

        Args:
            folder: Folder on this machine that `save_pretrained` wrote.
            name: Name of the new policy.

        Raises:
            RunError: If prompts are being answered, or no replica is left.
            PerturnError: If the weights cannot be read.
        """
        refuse_update(len(self._waiting) + sum(len(one.asked) for one in self._living))
        files = _send(self._connection, str(folder))
        if not files:
            raise RunError(f"{folder} is no folder of a model; give what save_pretrained wrote.")
        serve, model, *_ = self._arguments
        self._arguments, self.name = (serve, model, files, name), name
        stale, self._coming = self._coming, []  # these replicas load the old weights
        for replica in stale:
            self._connection.end(replica)
            self._start()
        with self._connection.reached():
            replies = [(one, one.actor.update_weights.remote(files, name)) for one in self._living]
        for replica, reply in replies:
            self._hear(replica, reply)
        self._wait(1)

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        replica = self._homes.pop(conversation, None)
        if replica is not None and not replica.gone:
            self._connection.tell(replica.actor.forget, conversation)

    def close(self) -> None:
        """End all replicas."""
        for replica in (*self._living, *self._coming):
            replica.gone = True
            self._connection.end(replica)
        self._living, self._coming = [], []

    def _pass_on(self) -> None:
        """Send each replica its waiting prompts, and request answers from replicas with open prompts."""
        shares: dict[_Replica, list[tuple[Prompt, Sampling]]] = {}
        for prompt, sampling in self._waiting:
            home = home_of(prompt.conversation, self._homes, self._living)
            shares.setdefault(home, []).append((prompt, sampling))
        self._waiting = []
        for replica, share in shares.items():
            for sampling, several in groupby(share, key=itemgetter(1)):
                numbered = [(self._numbered + index, prompt) for index, (prompt, _) in enumerate(several)]
                self._numbered += len(numbered)
                replica.asked |= {number: (prompt, sampling) for number, prompt in numbered}
                self._connection.tell(replica.actor.submit, numbered, sampling)
        for replica in self._living:
            if replica.asked and replica.poll is None:
                replica.poll = replica.actor.answers.remote(_POLL_S)

    def _start(self) -> None:
        """Request one more replica, on any node with free resources."""
        with self._connection.reached():
            actor = self._connection.actor(
                EngineServer, num_cpus=self._cluster.engine_cpus, num_gpus=self._cluster.engine_gpus
            )
            identity, opened = actor.identity.remote(), actor.open.remote(*self._arguments)
        self._coming.append(_Replica(actor, identity, opened, self._started))
        self._started += 1

    def _wait(self, wanted: int) -> None:
        """Wait for a number of replicas, up to the time limit; fewer replicas suffice.

        Raises:
            RunError: If there is no replica at the end of the wait.
        """
        until = time.monotonic() + self._cluster.wait_seconds
        while len(self._living) < wanted and self._connection.are_coming(self._coming, until):
            self._admit(0.5)
        if not self._living:
            why = f"the last one was lost: {self._why}; " if self._why else ""
            raise RunError(
                f"no replica of the policy has room: {why}cluster.engine_cpus={self._cluster.engine_cpus:g} and "
                f"cluster.engine_gpus={self._cluster.engine_gpus:g} were not free on any node within "
                f"{self._cluster.wait_seconds:g} s (cluster.wait_seconds). What was recorded is kept: start nodes, and "
                "the same command goes on."
            )

    def _admit(self, seconds: float) -> None:
        """Wait up to `seconds` for new replicas, and use those that have started.

        Raises:
            ConfigError: If a replica has another installation, or serves another policy, than the others.
        """
        for replica in self._connection.started(self._coming, seconds):
            found, name = self._hear(replica, replica.identity), self._hear(replica, replica.started)
            if found is None or name is None:
                self._coming.remove(replica)
                continue
            check_identity(f"replica {replica.number} of the policy on {found[0]}", found[1])
            self.name = self.name or name
            must = f"serve {self.name}, as other replicas do"
            remedy = "If model.dtype is auto and the nodes are of different kinds, set it."
            check_fit(name == self.name, f"the replica on {found[0]}", must, name, remedy)
            self._coming.remove(replica)
            self._living.append(replica)

    def _hear(self, replica: _Replica, reply: Any) -> Any:
        """Wait for a replica's reply and return it; None if the replica is lost.

        Raises:
            PerturnError: If the replica's code raised an exception.
        """
        try:
            return self._connection.get(reply)
        except Lost as error:
            if isinstance(error.cause, PerturnError):
                raise error.cause from error
            if error.cause is not None:
                raise RunError(
                    f"replica {replica.number} of the policy failed: {last_line(error.cause)}"
                ) from error
            self._lose(replica, error)
            return None

    def _lose(self, replica: _Replica, error: Lost) -> None:
        """Drop a lost replica, queue its prompts again, and start another replica.

        Raises:
            RunError: If too many replicas were lost in a row.
        """
        if replica.gone:
            return
        replica.gone = True
        self._waiting += replica.asked.values()
        replica.asked = {}
        self._living = [one for one in self._living if one is not replica]
        self._homes = {key: home for key, home in self._homes.items() if home is not replica}
        self._lost, self._why = self._lost + 1, str(error)
        if self._lost > _LOSSES_IN_A_ROW:
            raise RunError(
                f"{self._lost} replicas of the policy were lost in a row, the last one with {error}; does "
                "the model fit into the memory of a node?"
            ) from error
        _logger.warning("replica %d of the policy was lost: %s", replica.number, error)
        self._connection.end(replica)
        self._start()


def _send(connection: Connection, model: str) -> dict[str, Any]:
    """Put the files of a model folder into Ray's object store, so that nodes need no shared disk.

    Returns:
        References to the files' bytes, by file name; empty if `model` is a Hub id.
    """
    if not Path(model).is_dir():
        return {}
    files = [file for file in sorted(Path(model).iterdir()) if file.suffix in _MODEL_FILES]
    return {file.name: connection.put(np.fromfile(file, dtype=np.uint8)) for file in files}
