"""An engine that passes the policy's prompts to one engine and the user's to another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from perturn.errors import ConfigError, ContextFull, EngineFailure, RunError
from perturn.types import Action, Engine, Prompt, Sampling, StreamingEngine

_Answer = Action | EngineFailure
_PAUSE = 0.05
"""Seconds that `advance` waits for the user where the policy has nothing to answer."""


def with_user(engine: Engine, user: Engine, sampling: Sampling) -> Engine:
    """Return an engine for the prompts of a policy and of a simulated user; a streaming one, if the policy's is.

    Both work at the same time. Neither is closed with it.

    Args:
        engine: Answers the policy's prompts.
        user: Answers the user's.
        sampling: How the user's answers are decoded.
    """
    if isinstance(engine, StreamingEngine):
        return _Streaming(engine, user, sampling)
    return _Together(engine, user, sampling)


class _Together:
    """Of a policy's engine that answers prompts together."""

    def __init__(self, engine: Engine, user: Engine, sampling: Sampling) -> None:
        self.name = engine.name
        self._engine, self._user, self._sampling = engine, user, sampling
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="user")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[_Answer]:
        """Return one action a prompt, in order."""
        theirs = [prompt for prompt in prompts if prompt.of_user]
        ours = [prompt for prompt in prompts if not prompt.of_user]
        said = self._thread.submit(self.ask_user, theirs) if theirs else None
        acted = iter(self._engine.generate(ours, sampling) if ours else ())
        spoken = iter(said.result() if said else ())
        return [next(spoken if prompt.of_user else acted) for prompt in prompts]

    def ask_user(self, prompts: Sequence[Prompt]) -> list[_Answer]:
        """Return the user's answers."""
        asked = [replace(prompt, conversation=_conversation(prompt.conversation)) for prompt in prompts]
        try:
            answers = self._user.generate(asked, self._sampling)
        except (ConfigError, RunError) as error:
            where = "user.model is its model, and user.engine its server"
            raise RunError(f"the user cannot be asked: {error} ({where}.)") from error
        return [
            EngineFailure(f"the user's model: {each}") if isinstance(each, ContextFull) else each
            for each in answers
        ]

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation, and of the user's side of it."""
        self._engine.forget(conversation)
        self._user.forget(_conversation(conversation))

    def close(self) -> None:
        """Leave the engines open: their owners close them."""
        self._thread.shutdown()


class _Streaming:
    """Of a policy's engine that takes prompts on while it answers others."""

    def __init__(self, engine: StreamingEngine, user: Engine, sampling: Sampling) -> None:
        self.name = engine.name
        self._engine, self._together = engine, _Together(engine, user, sampling)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="user")
        self._open = 0
        self._waiting: list[Prompt] = []
        self._asked: list[Prompt] = []
        self._said: Future[list[_Answer]] | None = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[_Answer]:
        """Return one action a prompt, in order."""
        return self._together.generate(prompts, sampling)

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Take prompts on."""
        ours = [prompt for prompt in prompts if not prompt.of_user]
        self._waiting += [prompt for prompt in prompts if prompt.of_user]
        self._open += len(ours)
        if ours:
            self._engine.submit(ours, sampling)
        self._ask()

    def advance(self) -> list[tuple[Prompt, _Answer]]:
        """Work for a moment; return the prompts that were answered, and their answers."""
        answered = self._engine.advance() if self._open else []
        self._open -= len(answered)
        if self._said is not None:
            wait([self._said], timeout=0.0 if self._open or answered else _PAUSE)
            if self._said.done():
                answered += zip(self._asked, self._said.result(), strict=True)
                self._said = None
                self._ask()
        return answered

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation, and of the user's side of it."""
        self._together.forget(conversation)

    def close(self) -> None:
        """Leave the engines open: their owners close them."""
        self._together.close()
        self._thread.shutdown()

    def _ask(self) -> None:
        """Ask the user all that waits, unless the user is speaking."""
        if self._said is None and self._waiting:
            self._asked, self._waiting = self._waiting, []
            self._said = self._thread.submit(self._together.ask_user, self._asked)


def _conversation(name: str) -> str:
    """Return the user's side of a conversation."""
    return f"{name}~user"
