"""Connect agents' HTTP requests to the episodes of a run.

An agent sends a request to the endpoint of this process. The request waits while its episode yields the prompt to the
run's engine, which answers the prompts of many episodes in a batch. The episode then passes the answer back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

from perturn.episodes.engine_abilities import EngineAbilities
from perturn.errors import EngineFailure, PerturnError, RunError
from perturn.serve.endpoint import Endpoint
from perturn.serve.settings import ServeSettings
from perturn.types import Action, Prompt, Sampling, Task, Trajectory

_LONG = 10.0**7
"""Time limits of the endpoint, in seconds. The limits are large, since an episode has its own limits."""
_WAITING = 512
"""Largest number of requests that wait for their episodes at the same time."""
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
    """An agent's request that waits for the policy's answer."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.answered: Future[Action] = Future()
        self.prompt_tokens = self.answer_tokens = 0

    def is_with(self, other: Question) -> bool:
        """Return whether another question asks for a further answer to the same request (`n` in chat completions).

        Such prompts share their new messages, and equal requests do not. A request's answers are recorded together.
        """
        heard = self.prompt.observation
        return bool(heard) and heard is other.prompt.observation  # Python has a single empty tuple

    def is_abandoned(self) -> bool:
        """Return whether the client no longer waits, so that no answer is recorded."""
        return self.answered.cancelled()

    def answer(self, answer: Action | PerturnError, prompt_tokens: int = 0, answer_tokens: int = 0) -> None:
        """Set the answer, or an error that rejects the request. An abandoned request ignores it.

        Args:
            answer: Action of the policy, or the error.
            prompt_tokens: Number of tokens of the prompt.
            answer_tokens: Number of tokens of the answer.
        """
        self.prompt_tokens, self.answer_tokens = prompt_tokens, answer_tokens
        if not self.answered.set_running_or_notify_cancel():
            return
        if isinstance(answer, Action):
            self.answered.set_result(answer)
        else:
            self.answered.set_exception(answer)


class _Episodes:
    """An engine that forwards each prompt to the running episode of its session and waits for the answer."""

    name = "policy"

    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}
        self._answer_tokens: dict[str, int] = {}
        self.abilities = EngineAbilities(
            concurrent_calls=_WAITING, prompt_tokens=self._prompt_tokens, answer_tokens=self._answer_tokens
        )
        self.of_session: dict[str, Callable[[Question], None]] = {}
        self._open: dict[str, set[Question]] = {}
        self._lock = threading.Lock()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return the episodes' answers. The argument `sampling` is ignored, since the run's settings apply."""
        asked = [self._ask(prompt) for prompt in prompts]
        found: list[Action | EngineFailure] = []
        for each in asked:
            try:
                found.append(each.answered.result())
                self._prompt_tokens[each.prompt.conversation] = each.prompt_tokens
                self._answer_tokens[each.prompt.conversation] = each.answer_tokens
            except CancelledError:
                found.append(EngineFailure("the client no longer waits for the answer."))
            except PerturnError as error:
                found.append(error)  # type: ignore[arg-type]  # the endpoint rejects the request with any PerturnError
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
        """Start a session: from now on, call `tell` with each of its requests."""
        with self._lock:
            self.of_session[session], self._open[session] = tell, set()

    def end(self, session: str) -> None:
        """End a session and reject the requests that still wait."""
        with self._lock:
            del self.of_session[session]
            waiting = self._open.pop(session)
        for asked in list(waiting):
            asked.answer(EngineFailure("the episode of this session is over."))

    def cancel(self, conversation: str) -> None:
        """Give up the request of a conversation, whose client has gone."""
        for asked in list(self._open.get(conversation.rpartition("#")[0], ())):
            if asked.prompt.conversation == conversation:
                asked.answered.cancel()

    def forget(self, conversation: str) -> None:
        """Delete the token counts of a conversation that has ended."""
        self._prompt_tokens.pop(conversation, None)
        self._answer_tokens.pop(conversation, None)

    def close(self) -> None:
        """Do nothing, since this engine holds no resources."""


class Line:
    """The endpoint's session for one episode of an agent."""

    def __init__(self, endpoint: Endpoint, episodes: _Episodes, session: str) -> None:
        self._endpoint, self._episodes, self._session = endpoint, episodes, session
        self.url = endpoint.url(session).removesuffix("/v1")
        """Base URL of the session; the paths below it are `v1` and `reward`."""
        self.key = endpoint.session_key(session)
        """API key that the agent's requests must carry."""

    def turns(self) -> int | None:
        """Return the number of recorded turns; None if the agent has ended the session."""
        try:
            return len(self._endpoint.trajectory(self._session).turns)
        except RunError:
            return None

    def rewards(self) -> tuple[float, ...]:
        """Return the rewards of the recorded turns; empty if the agent has ended the session."""
        try:
            return tuple(turn.reward for turn in self._endpoint.trajectory(self._session).turns)
        except RunError:
            return ()

    def is_rewarded(self) -> bool:
        """Return whether the agent has posted a reward."""
        try:
            return any(
                turn["reward"] is not None for turn in self._endpoint.summary(self._session)["recorded"]
            )
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
        """End the session and return its trajectory.

        Args:
            reward: Reward of the episode; None: the reward that the agent posted, or 0.
            success: Whether the task is solved; None: the value that the agent posted. If it posted none, the reward of
                the episode must be at least 1; without such a reward, the sum of the turns' rewards.
            error: Reason why the episode is marked FAILED; None if it is not.
            truncated: Whether a limit ended the episode.
        """
        self._episodes.end(self._session)
        return self._endpoint.end_session(
            self._session, reward=reward, success=success, error=error, truncated=truncated
        )


class Bridge:
    """The endpoint that all agents of a process share."""

    def __init__(self) -> None:
        self._episodes = _Episodes()
        self._endpoint = Endpoint(self._episodes, _SETTINGS)

    def open(self, task: Task, sample: int, seed: int, ask: Callable[[Question], None]) -> Line:
        """Open a session for an episode; the endpoint then calls `ask` with each request, from any thread."""
        session = self._endpoint.new_session(task, sample, seed)
        self._episodes.begin(session, ask)
        return Line(self._endpoint, self._episodes, session)


_bridge: Bridge | None = None
_lock = threading.Lock()


def open_bridge() -> Bridge:
    """Return the shared endpoint of this process. The first call starts it."""
    global _bridge
    with _lock:
        if _bridge is None:
            _bridge = Bridge()
        return _bridge
