"""Replicas of the policy on the nodes of a cluster, as one engine."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perturn.cluster.connect import cause, check_identity, connect, last_line, losses, nodes, reached
from perturn.cluster.servers import EngineServer
from perturn.errors import ConfigError, EngineFailure, PerturnError, RunError
from perturn.settings.cluster import Cluster
from perturn.types import Action, Engine, Prompt, Sampling

_logger = logging.getLogger(__name__)

_MODEL_FILES = {".safetensors", ".json", ".jinja", ".txt", ".model"}
"""Kinds of the files that a model is loaded from."""
_MOMENT_S = 0.02
"""Seconds to wait for an answer before prompts that came meanwhile are looked at."""
_LOSSES_IN_A_ROW = 16
"""Replicas that may be lost without an answer in between: what kills each of them is no accident."""


@dataclass(eq=False)
class _Replica:
    """One replica, and how far it is."""

    number: int
    server: Any
    identity: Any
    """Reference to its machine and perturn: it is there once the replica has a node."""
    opened: Any
    """Reference to the policy it serves: it is there once the model is loaded."""
    gone: bool = False


class Replicas:
    """A streaming engine whose replicas answer side by side, each its own conversations; none waits for another.

    A conversation stays with a replica, which keeps its keys and values; those of a replica that is lost move to
    others, which compute them again. A replica that is lost is started again wherever there is room.
    """

    def __init__(self, cluster: Cluster, serve: Callable[[str], Engine], model: str) -> None:
        """Start the replicas.

        Args:
            cluster: The cluster.
            serve: Makes the engine of a model, on a node; a function that can be imported there.
            model: A folder, whose files are sent through Ray; or a Hub id, which each node loads itself.

        Raises:
            PerturnError: If no replica finds room, or it cannot load the model.
        """
        self._ray = connect(cluster)
        self._losses = losses(self._ray)
        self._cluster = cluster
        self._refuse_too_large()
        self._files = _send(self._ray, model)
        self._arguments: tuple[Any, ...] = serve, model, self._files
        self._started = self._lost = 0
        self._coming: list[_Replica] = []
        self._living: list[_Replica] = []
        self._homes: dict[str, _Replica] = {}
        self._waiting: list[tuple[Prompt, Sampling]] = []
        self._asked: dict[Any, tuple[_Replica, list[Prompt], Sampling]] = {}
        self._why: Exception | None = None
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
        """One action a prompt; those of a replica that is lost meanwhile are answered by another.

        Raises:
            RunError: If no replica is left, or one after the other is lost.
        """
        self.submit(prompts, sampling)
        answers: dict[int, Action | EngineFailure] = {}
        while any(id(prompt) not in answers for prompt in prompts):
            answers |= {id(prompt): answer for prompt, answer in self.advance()}
        return [answers[id(prompt)] for prompt in prompts]

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Take prompts on."""
        self._waiting += [(prompt, sampling) for prompt in prompts]

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Give each idle replica what waits for it; what is answered within a moment.

        Raises:
            RunError: If no replica is left, or one after the other is lost.
        """
        self._admit(0)
        self._wait(1)
        with reached(self._ray):
            self._ask()
            ready, _ = self._ray.wait(list(self._asked), timeout=_MOMENT_S) if self._asked else ([], [])
        answered: list[tuple[Prompt, Action | EngineFailure]] = []
        for reply in ready:
            replica, batch, sampling = self._asked.pop(reply)
            answers = self._hear(replica, reply)
            if answers is None:
                self.submit(batch, sampling)
            else:
                answered += zip(batch, answers, strict=True)
                self._lost = 0
        return answered

    def update_weights(self, folder: str | Path, name: str) -> None:
        """Serve other weights of the same model from now on; a replica that is lost meanwhile is started with them.

        Args:
            folder: What `save_pretrained` wrote, on this machine.
            name: Identity of the new policy.

        Raises:
            RunError: If prompts are being answered, or no replica is left.
            PerturnError: If the weights cannot be read.
        """
        if busy := len(self._waiting) + sum(len(batch) for _, batch, _ in self._asked.values()):
            raise RunError(f"{busy} prompts are being answered; update weights between the batches.")
        self._files = _send(self._ray, str(folder))
        if not self._files:
            raise RunError(f"{folder} is no folder of a model; give what save_pretrained wrote.")
        serve, model, *_ = self._arguments
        self._arguments, self.name = (serve, model, self._files, name), name
        for replica in self._coming:  # they load what is to be replaced
            with suppress(*self._losses):
                self._ray.kill(replica.server)
        started, self._coming = len(self._coming), []
        for _ in range(started):
            self._start()
        with reached(self._ray):
            replies = [(one, one.server.update_weights.remote(self._files, name)) for one in self._living]
        for replica, reply in replies:
            self._hear(replica, reply)
        self._wait(1)

    def forget(self, conversation: str) -> None:
        """Free what is kept of a conversation."""
        replica = self._homes.pop(conversation, None)
        if replica in self._living:
            assert replica is not None
            with suppress(*self._losses):
                replica.server.forget.remote(conversation)

    def close(self) -> None:
        """End all replicas."""
        for replica in (*self._living, *self._coming):
            with suppress(*self._losses):
                self._ray.kill(replica.server)
        self._living, self._coming = [], []

    def _ask(self) -> None:
        """Give each idle replica all that waits for it; what comes while it works makes its next batch."""
        busy = {replica for replica, _, _ in self._asked.values()}
        shares: dict[_Replica, tuple[list[Prompt], Sampling]] = {}
        left = []
        for prompt, sampling in self._waiting:
            home = self._home(prompt)
            batch, its_sampling = shares.setdefault(home, ([], sampling))
            if home in busy or sampling != its_sampling:
                left.append((prompt, sampling))
            else:
                batch.append(prompt)
        self._waiting = left
        for replica, (batch, sampling) in shares.items():
            if batch:
                self._asked[replica.server.generate.remote(batch, sampling)] = replica, batch, sampling

    def _home(self, prompt: Prompt) -> _Replica:
        """The replica that has the conversation, or that has fewest."""
        if prompt.conversation not in self._homes:
            held = Counter(self._homes.values())
            self._homes[prompt.conversation] = min(self._living, key=lambda replica: held[replica])
        return self._homes[prompt.conversation]

    def _refuse_too_large(self) -> None:
        """Refuse replicas that no node could ever hold."""
        want = self._cluster
        there = nodes(self._ray)
        if not any(node.cpus >= want.engine_cpus and node.gpus >= want.engine_gpus for node in there):
            seen = (
                ", ".join(f"{node.host}: {node.cpus:g} and {node.gpus:g}" for node in there) or "none has any"
            )
            raise ConfigError(
                f"no node of the cluster has cluster.engine_cpus={want.engine_cpus:g} CPUs and "
                f"cluster.engine_gpus={want.engine_gpus:g} GPUs ({seen})."
            )

    def _start(self) -> None:
        """Ask for one replica more, wherever there is room, on nodes in turn.

        Raises:
            RunError: If the cluster is gone.
        """
        actor = self._ray.remote(EngineServer).options(
            num_cpus=self._cluster.engine_cpus,
            num_gpus=self._cluster.engine_gpus,
            scheduling_strategy="SPREAD",
        )
        with reached(self._ray):
            server = actor.remote()
            identity, opened = server.identity.remote(), server.open.remote(*self._arguments)
        self._coming.append(_Replica(self._started, server, identity, opened))
        self._started += 1

    def _wait(self, wanted: int) -> None:
        """Wait until so many replicas answer, or for those that have found room in time.

        Raises:
            RunError: If there is none.
        """
        until = time.monotonic() + self._cluster.wait_seconds
        while len(self._living) < wanted and self._coming:
            loading = [one for one in self._coming if self._is_there(one.identity)]
            if not loading and time.monotonic() > until:
                break
            self._admit(0.5)
        if not self._living:
            why = f"the last one was lost: {last_line(self._why)}; " if self._why else ""
            raise RunError(
                f"no replica of the policy has room: {why}cluster.engine_cpus={self._cluster.engine_cpus:g} and "
                f"cluster.engine_gpus={self._cluster.engine_gpus:g} were not free on any node within "
                f"{self._cluster.wait_seconds:g} s (cluster.wait_seconds). What was recorded is kept: start nodes, and "
                "the same command goes on."
            )

    def _is_there(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def _admit(self, seconds: float) -> None:
        """Take in the replicas that are ready in time.

        Raises:
            PerturnError: If one cannot load the model, or differs from the others.
        """
        if not self._coming:
            return
        ready, _ = self._ray.wait([one.opened for one in self._coming], timeout=seconds)
        for replica in [one for one in self._coming if one.opened in ready]:
            found, name = self._hear(replica, replica.identity), self._hear(replica, replica.opened)
            if found is None or name is None:
                self._coming.remove(replica)
                continue
            check_identity(f"replica {replica.number} of the policy on {found[0]}", found[1])
            self.name = self.name or name
            if name != self.name:
                raise ConfigError(
                    f"replicas disagree in what they serve: {self.name} and {name} (on {found[0]}); if model.dtype is "
                    "auto and the nodes are of different kinds, set it."
                )
            self._coming.remove(replica)
            self._living.append(replica)

    def _hear(self, replica: _Replica, reply: Any) -> Any:
        """Wait for a reply; None if the replica is lost.

        Raises:
            PerturnError: What the replica's own code raised.
        """
        try:
            return self._ray.get(reply)
        except self._losses as error:
            inner = cause(self._ray, error)
            if isinstance(inner, PerturnError):
                raise inner from error
            if inner is not None:
                raise RunError(
                    f"replica {replica.number} of the policy failed: {last_line(inner)}"
                ) from error
            self._lose(replica, error)
            return None

    def _lose(self, replica: _Replica, error: Exception) -> None:
        """Give a replica up and start another.

        Raises:
            RunError: If one after the other is lost.
        """
        if replica.gone:
            return
        replica.gone = True
        self._living = [one for one in self._living if one is not replica]
        self._homes = {key: home for key, home in self._homes.items() if home is not replica}
        self._lost, self._why = self._lost + 1, error
        if self._lost > _LOSSES_IN_A_ROW:
            raise RunError(
                f"{self._lost} replicas of the policy were lost in a row, the last one with {last_line(error)}; does "
                "the model fit into the memory of a node?"
            ) from error
        _logger.warning("replica %d of the policy was lost: %s", replica.number, last_line(error))
        with suppress(*self._losses):
            self._ray.kill(replica.server)
        self._start()


def _send(ray: Any, model: str) -> dict[str, Any]:
    """The files of a model folder in Ray's object store, by name: nodes need share no disk. Nothing for a Hub id."""
    if not Path(model).is_dir():
        return {}
    files = [file for file in sorted(Path(model).iterdir()) if file.suffix in _MODEL_FILES]
    return {file.name: ray.put(np.fromfile(file, dtype=np.uint8)) for file in files}
