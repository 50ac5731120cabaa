"""The sessions of an endpoint: find the session of a request, answer the request, and end sessions.

All code in this module runs in the endpoint's event loop. Only the engine has its own thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from perturn.engines.engine_process import EngineProcess
from perturn.episodes.prefix_matching import Position, Sequences
from perturn.episodes.seeds import seed_of
from perturn.errors import ContextFull, PerturnError
from perturn.io.plain_data import named_error
from perturn.serve.agent_session import Session
from perturn.serve.answering import Answering, read_action, sampling_of
from perturn.serve.ended_sessions import EndedSessions
from perturn.serve.exchange import Ask, Refusal, Reply, check_name, refused
from perturn.serve.record import LOST, Record, SampleNumbers
from perturn.serve.request_parser import RequestParser, continued
from perturn.serve.reward_call import Judge, RewardCall
from perturn.serve.settings import ServeSettings
from perturn.serve.unnamed_sessions import UnnamedSessions, longest_idle
from perturn.types import Engine, Prompt, Sampling, Status, Task, Trajectory

_NO_TURN = "the session ended without a turn, so no turn can have its reward."
"""Error of an episode without turns, unless a caller in this process checks its episodes."""


class SessionManager:
    """All sessions of an endpoint, open and ended."""

    def __init__(
        self,
        engine: Engine | EngineProcess,
        settings: ServeSettings,
        record: Record | None,
        judge: Judge | None,
        environment: str,
        seed: int,
    ) -> None:
        """Start without sessions; call `start` in the event loop afterwards."""
        self.engine, self.settings, self.environment = engine, settings, environment
        self.counts: Counter[str] = Counter()
        self._record, self._judge, self._seed = record, judge, seed
        self._sessions: dict[str, Session] = {}
        self._kept: set[str] = set()  # sessions that a caller in this process opened
        self._results: dict[str, tuple[Session, bool, str | None]] = {}
        """Name of a caller's ended session -> (session, whether a limit ended it, error)."""
        self._ended = EndedSessions()
        self._samples = SampleNumbers() if record is None else record.samples
        self._unnamed = UnnamedSessions()
        self._of_response: dict[str, Session] = {}
        self._numbers = 0
        self._writer = ThreadPoolExecutor(1, "perturn-record")
        self._ending: dict[asyncio.Future[Trajectory], str] = {}
        """Names of sessions that are being rewarded and recorded."""

    def start(self) -> None:
        """Start the engine's thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._answering = Answering(self.engine, self.settings, self.counts)
        self._reads_thoughts = self._answering.abilities.reads_thoughts
        self._reward = RewardCall(self._judge, self.settings.reward_seconds) if self._judge else None

    # Find the session of a request.

    def find_or_open(self, name: str, parser: RequestParser | None = None) -> Session:
        """Return the session of a name; open it if it is not open.

        Raises:
            Refusal: If the name is invalid, the session was cut, the request starts no new conversation after its end,
                or too many sessions are open.
        """
        check_name(name)
        if name in self._sessions:
            return self._sessions[name]
        if self._ended.reason(name):
            self._ended.check(name, self._alone(parser) if parser else None)
        return self.open(name, Task(name), parser=parser)

    def _alone(self, parser: RequestParser) -> Position:
        """Return the position of a parsed request in a session without turns."""
        return parser.position(Sequences(reads_thoughts=self._reads_thoughts))

    def known(self, name: str) -> Session:
        """Return an open session.

        Raises:
            Refusal: If no open session has this name.
        """
        if name in self._sessions:
            return self._sessions[name]
        if reason := self._ended.reason(name):
            said = f"session {name!r} has ended ({reason})."
            raise Refusal(409, said, "session_ended", "session")
        raise Refusal(404, f"there is no session {name!r:.80}.", "not_found", "session")

    def open(
        self,
        name: str,
        task: Task,
        sample: int | None = None,
        seed: int | None = None,
        *,
        sampling: Sampling | None = None,
        is_kept: bool = False,
        is_automatic: bool = False,
        parser: RequestParser | None = None,
    ) -> Session:
        """Open a session.

        Raises:
            Refusal: If the session is open or being recorded, its episode is recorded, or too many sessions are open.
        """
        if name in self._sessions or name in self._ending.values():
            state = "open already" if name in self._sessions else "being recorded"
            raise Refusal(409, f"session {name!r} is {state}.", "session_exists", "session")
        excess = self._excess()
        if sample is None:
            sample = self._samples.reserve(task.id)
        elif not (is_kept or is_automatic):
            is_free = self._samples.take(task.id, sample)
            if not is_free and self._record is not None:
                said = f"task {task.id!r}, sample {sample}, is open or recorded already; count sample up."
                raise Refusal(409, said, "exists", "sample")
        seed = seed_of(self._seed, task.id, sample) if seed is None else seed
        self._numbers += 1
        session = Session(
            name,
            task,
            self._numbers,
            sample,
            seed,
            sampling,
            reads_thoughts=self._reads_thoughts,
            parser=parser or RequestParser(),
            is_automatic=is_automatic,
        )
        if is_kept:
            self._kept.add(name)
        elif self._record is not None:
            self._record.begun(task, sample, seed, self.engine.name)
        if excess is not None:
            self._close(excess, "cut: max_sessions were open", True, None)
        self._sessions[name] = session
        self._ended.remove(name)
        self.counts["opened"] += 1
        return session

    def _excess(self) -> Session | None:
        """Return the session to cut if another session is opened; None if `max_sessions` allows one more.

        Raises:
            Refusal: If too many sessions are open.
        """
        most = self.settings.max_sessions
        if len(self._sessions) < most:
            return None
        # More are open only if a cut session could not be recorded, so that it is open again.
        found = longest_idle(self._sessions.values()) if len(self._sessions) == most else None
        if found is None:
            self.counts["refused"] += 1
            raise Refusal(429, "too many sessions are open; come back later.", "too_many_sessions")
        return found

    # Answer a request.

    def session_of(self, ask: Ask, name: str | None) -> tuple[Ask, Session]:
        """Return a request and its session; the conversation of `previous_response_id` is prepended to the request.

        Raises:
            Refusal: If a message is malformed, a parameter is not supported, or there is no such response.
        """
        ask = self._answering.checked(ask)
        previous = ask.extra.get("previous")
        if previous is not None:
            session = self._of_response.get(previous)
            if session is None or (name is not None and session.id != name):
                said = f"there is no response {previous!r:.80}."
                raise Refusal(404, said, "not_found", "previous_response_id")
            ask = replace(ask, messages=continued(session.conversation_up_to(previous), ask.messages))
        elif name is None:
            return ask, self._by_conversation(ask)
        else:
            session = self._sessions.get(name)
        parser = RequestParser() if session is None else session.parser
        parser.read(ask)  # before opening a session, so that a malformed request opens none
        return ask, self.find_or_open(str(name), parser) if session is None else session

    def _by_conversation(self, ask: Ask) -> Session:
        """Return the session whose conversation a request continues; open a new session if there is none."""
        parser = RequestParser()
        parser.read(ask)
        session = self._unnamed.find(self._alone(parser).end_key)
        if session is not None:
            session.parser.read(ask)
            return session
        name = f"auto-{secrets.token_hex(8)}"
        return self.open(name, Task(name), 0, is_automatic=True, parser=parser)

    async def begin(self, session: Session, ask: Ask, position: Position) -> list[Prompt]:
        """Start a request at once, so that other requests find its session in use; then `await answer(...)`.

        Args:
            session: The session of the request.
            ask: The request.
            position: Recorded turn that the request continues. Get it before another request of the session is read.

        Raises:
            Refusal: If the session has reached its limit of turns.
        """
        session.full_context = None  # only the newest request counts
        if len(session) + session.in_flight + ask.n > self.settings.max_turns:
            if session.in_flight:
                said = f"session {session.id!r} reaches max_turns with its answers in flight; wait for them."
                raise Refusal(429, said, "too_many_calls")
            await self.finish(session, "cut: it reached max_turns", truncated=True)
            raise Refusal(409, f"session {session.id!r} reached max_turns and was cut.", "session_ended")
        return session.begin(position, ask)

    async def answer(
        self, session: Session, ask: Ask, position: Position, prompts: Sequence[Prompt], response: str
    ) -> Reply:
        """Answer the prompts of `begin`, and record the turns under the id of the response.

        Raises:
            Refusal: If the request cannot be answered.
        """
        most = min(ask.max_tokens or self.settings.default_new_tokens, self.settings.max_new_tokens)
        sampling = session.sampling or sampling_of(ask.temperature, ask.top_p, most)
        try:
            actions = await self._answering.sampled(prompts, sampling)
            answers = tuple(read_action(action, ask) for action in actions)
            if self._sessions.get(session.id) is not session:
                raise Refusal(409, f"session {session.id!r} has ended meanwhile.", "session_ended", "session")
            turns = session.record(response, position, prompts, answers)
        except PerturnError as error:
            if isinstance(error, ContextFull):
                session.full_context = named_error(error)
            raise refused(error) from None
        finally:
            session.end(prompts)
        if session.is_automatic:
            self._unnamed.add(session, [key for index in turns for key in session.end_keys(index)])
        self._of_response[response] = session
        self.counts["turns"] += len(answers)
        if position.broke is not None:
            self.counts[f"break: {position.broke.cause}"] += 1
        return self._answering.reply(response, ask, prompts, actions, answers)

    # End a session.

    async def finish(
        self, session: Session, how: str, *, truncated: bool = False, error: str | None = None
    ) -> Trajectory:
        """End a session, compute its reward, and record it unless a caller in this process opened it.

        Args:
            session: Open session.
            how: Reason of the end: `ended`, or a text that starts with `cut`.
            truncated: Whether a limit ended the session.
            error: Error of the episode, which is then FAILED.

        Raises:
            Refusal: If the session has already ended, or cannot be recorded. A session that is not recorded stays open.
        """
        ended = self._close(session, how, truncated, error)
        return await asyncio.shield(ended)  # continues if the client disconnects

    def _close(
        self, session: Session, how: str, truncated: bool, error: str | None
    ) -> asyncio.Future[Trajectory]:
        """End a session at once, and return the future of its recorded episode; see `finish`."""
        if self._sessions.get(session.id) is not session:
            raise Refusal(409, f"session {session.id!r} has ended.", "session_ended", "session")
        if not len(session) and not truncated and session.id not in self._kept:
            error = error or _NO_TURN
        del self._sessions[session.id]
        self._forget(session)
        is_kept = session.id in self._kept
        reason = f"{how}; its episode belongs to a caller" if is_kept else how
        self._ended.add(session.id, reason, session.all_end_keys)
        ended = asyncio.ensure_future(self._finish(session, how, truncated, error))
        self._ending[ended] = session.id
        ended.add_done_callback(self._is_ended)
        return ended

    def _is_ended(self, ended: asyncio.Future[Trajectory]) -> None:
        del self._ending[ended]
        ended.exception()  # marks the exception as retrieved; a waiting caller still gets it

    async def _finish(self, session: Session, how: str, truncated: bool, error: str | None) -> Trajectory:
        """Compute the reward of a closed session, and record it."""
        trajectory = self._trajectory(session, truncated, error)
        is_kept = session.id in self._kept
        try:
            if session.unrecorded is not None:
                how, trajectory = session.unrecorded  # it ended before, and could not be recorded
            elif self._reward is not None and error is None:
                error = await self._reward.give(session, trajectory)
                trajectory = self._trajectory(session, truncated, error)
            failed = trajectory.status is Status.FAILED
            if is_kept:
                self._kept.discard(session.id)
                self._results[session.id] = session, truncated, trajectory.error if failed else None
            elif self._record is not None:
                await self._loop.run_in_executor(self._writer, self._record.ended, trajectory)
        except Exception as failure:  # whatever fails, the episode must not be lost
            session.unrecorded = how, trajectory
            self._restore(session)
            raise Refusal(503, f"the session stays open: {named_error(failure)}", "not_recorded") from failure
        self.counts["failed" if failed else "cut" if how.startswith("cut") else "ended"] += 1
        self.counts += Counter(shared=session.agents > 1, sharpened=trajectory.sharpened)
        return trajectory

    def _trajectory(self, session: Session, truncated: bool, error: str | None) -> Trajectory:
        outcome: dict[str, Any] = {"terminated": not truncated, "truncated": truncated}
        if error is not None:
            outcome = {"status": Status.FAILED, "error": error}
        return session.trajectory(policy=self.engine.name, environment=self.environment, **outcome)

    def _forget(self, session: Session) -> None:
        """Release all state of a session, also the engine's."""
        ended = Refusal(409, f"session {session.id!r} has ended.", "session_ended")
        self._answering.forget(session.conversations, ended)
        self._unnamed.remove(session)
        for response in session.responses:
            self._of_response.pop(response, None)

    def _restore(self, session: Session) -> None:
        """Open a session again that could not be recorded. Without a further turn or reward, its end stays as it is."""
        self._sessions[session.id] = session
        self._ended.remove(session.id)
        self._of_response |= dict.fromkeys(session.responses, session)
        if session.is_automatic:
            self._unnamed.add(session, session.all_end_keys)

    def so_far(self, name: str) -> Trajectory:
        """Return the episode of an open session so far."""
        session = self.known(name)
        return session.trajectory(
            policy=self.engine.name, environment=self.environment, status=Status.UNFINISHED
        )

    async def collect(
        self, name: str, reward: float | None, success: bool | None, error: str | None, truncated: bool
    ) -> Trajectory:
        """End a session of a caller in this process if it is open, and return its episode."""
        for ended in [each for each, of in self._ending.items() if of == name]:
            with suppress(Refusal):  # if the episode could not be recorded, its session is still open
                await asyncio.shield(ended)
        if name not in self._results:
            how = "cut: by its caller" if truncated else "ended"
            await self.finish(self.known(name), how, truncated=truncated, error=error)
        session, cut, failure = self._results.pop(name)
        if reward is not None:
            session.give_reward(reward)
        if success is not None:
            session.success = success
        return self._trajectory(session, truncated or cut, error or failure)

    def expire(self) -> None:
        """Cut the sessions that are too old or have been idle for too long, without waiting for their rewards."""
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now - session.opened > self.settings.session_seconds:
                self._close(session, "cut: it reached session_seconds", True, None)
            elif not session.in_flight and now - session.touched > self.settings.idle_seconds:
                self._close(session, "cut: it was idle for idle_seconds", True, None)

    async def stop(self) -> None:
        """Stop the endpoint: reject waiting requests, and record open sessions as lost."""
        if self._reward is not None:
            self._reward.close()
        for session in list(self._sessions.values()):
            with suppress(Refusal):  # if it cannot be recorded, the next endpoint with this folder records it
                await self.finish(session, "lost: the endpoint was closed", error=LOST)
        while self._ending:  # wait for sessions that are being recorded
            await asyncio.sleep(0.01)
        self._writer.shutdown()
        await self._loop.run_in_executor(None, self._answering.close)

    def summary(self) -> dict[str, Any]:
        """Return the counters of the endpoint as JSON data."""
        return {
            "policy": self.engine.name,
            "open": len(self._sessions),
            "in_flight": self._answering.in_flight,
            **dict(sorted(self.counts.items())),
        }
