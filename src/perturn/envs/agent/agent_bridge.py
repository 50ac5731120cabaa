"""The endpoint of the agents that a run plays: the episodes themselves answer, so that the loop need not change.

A run's engine answers the prompts of many episodes together. An agent's request waits here until its episode has been
sent the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from perturn.episodes.engine_abilities import EngineAbilities
from perturn.errors import EngineFailure, PerturnError, RunError
from perturn.serve.endpoint import Endpoint
from perturn.serve.settings import ServeSettings
from perturn.types import Action, Prompt, Sampling, Task, Trajectory

_LONG = 10.0**7
"""Seconds after which the endpoint would end a session; its episode has its own limits."""
_SETTINGS = ServeSettings(
    max_body_bytes=64 * 2**20,
    max_sessions=100_000,
    max_calls=100_000,
    max_turns=10**9,
    session_seconds=_LONG,
    idle_seconds=_LONG,
    request_seconds=_LONG,
)


class Question:
    """A request that waits for its answer."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.answered: Future[Action] = Future()
        self.prompt_tokens = self.answer_tokens = 0

    def answer(self, answer: Action | PerturnError, prompt_tokens: int = 0, answer_tokens: int = 0) -> None:
        """Answer it, with the number of tokens that were read and written; or refuse it with the error."""
        self.prompt_tokens, self.answer_tokens = prompt_tokens, answer_tokens
        if isinstance(answer, Action):
            self.answered.set_result(answer)
        else:
            self.answered.set_exception(answer)


class _Episodes:
    """An engine whose answers come from the episodes that are being played."""

    name = "policy"

    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}
        self._answer_tokens: dict[str, int] = {}
        self.abilities = EngineAbilities(
            concurrent=True, prompt_tokens=self._prompt_tokens, answer_tokens=self._answer_tokens
        )
        self.of_session: dict[str, Callable[[Question], None]] = {}
        self._open: dict[str, set[Question]] = {}
        self._lock = threading.Lock()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Wait for the answers of the episodes. The sampling of the run holds, whatever a request asks for."""
        asked = [self._ask(prompt) for prompt in prompts]
        found: list[Action | EngineFailure] = []
        for each in asked:
            try:
                found.append(each.answered.result())
                self._prompt_tokens[each.prompt.conversation] = each.prompt_tokens
                self._answer_tokens[each.prompt.conversation] = each.answer_tokens
            except PerturnError as error:
                found.append(error)  # type: ignore[arg-type]  # the endpoint takes each of ours as a refusal
        return found

    def _ask(self, prompt: Prompt) -> Question:
        session, asked = prompt.conversation.rpartition("#")[0], Question(prompt)
        with self._lock:
            tell = self.of_session.get(session)
            if tell is not None:
                self._open[session].add(asked)
        if tell is None:
            asked.answer(EngineFailure("the episode of this session is over."))
        else:
            asked.answered.add_done_callback(lambda _: self._open.get(session, set()).discard(asked))
            tell(asked)
        return asked

    def begin(self, session: str, tell: Callable[[Question], None]) -> None:
        """Tell of the requests of a session from now on."""
        with self._lock:
            self.of_session[session], self._open[session] = tell, set()

    def end(self, session: str) -> None:
        """End the episode: requests that still wait are rejected."""
        with self._lock:
            del self.of_session[session]
            waiting = self._open.pop(session)
        for asked in list(waiting):
            asked.answer(EngineFailure("the episode of this session is over."))

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        self._prompt_tokens.pop(conversation, None)
        self._answer_tokens.pop(conversation, None)

    def close(self) -> None:
        """Do nothing: nothing is held."""


class Line:
    """The session of one episode."""

    def __init__(self, endpoint: Endpoint, episodes: _Episodes, session: str) -> None:
        self._endpoint, self._episodes, self._session = endpoint, episodes, session
        self.url = endpoint.url(session).removesuffix("/v1")
        """Address of the session, under which are `v1` and `reward`."""
        self.key = endpoint.session_key(session)
        """API key that its requests must have."""

    def is_rewarded(self) -> bool:
        """Return whether the agent has posted a reward."""
        try:
            return any(turn.reward for turn in self._endpoint.trajectory(self._session).turns)
        except RunError:  # a reward of the whole episode has ended the session
            return True

    def finish(
        self,
        *,
        reward: float | None = None,
        success: bool | None = None,
        error: str | None = None,
        truncated: bool = False,
    ) -> Trajectory:
        """End the session; return its recording.

        Args:
            reward: Of the episode; None: the reward that the agent posted, else 0.
            success: Whether the task is solved; None: as the agent posted, else whether the reward is 1 or more.
            error: Why the episode has FAILED; None if it has not.
            truncated: Whether a limit ended it.
        """
        self._episodes.end(self._session)
        return self._endpoint.end_session(
            self._session, reward=reward, success=success, error=error, truncated=truncated
        )


class Bridge:
    """One endpoint for all agents of a process."""

    def __init__(self) -> None:
        self._episodes = _Episodes()
        self._endpoint = Endpoint(self._episodes, _SETTINGS)

    def open(self, task: Task, sample: int, seed: int, ask: Callable[[Question], None]) -> Line:
        """Open a session; `ask` is called with each of its requests, in any thread."""
        session = self._endpoint.new_session(task, sample, seed)
        self._episodes.begin(session, ask)
        return Line(self._endpoint, self._episodes, session)


_bridge: Bridge | None = None
_lock = threading.Lock()


def open_bridge() -> Bridge:
    """Return the endpoint of the agents of this process, which is started with the first of them."""
    global _bridge
    with _lock:
        if _bridge is None:
            _bridge = Bridge()
        return _bridge
