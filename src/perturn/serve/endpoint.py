"""The class `Endpoint`: an HTTP server through which agents call a policy, and which records their episodes."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perturn.engines.engine_process import EngineProcess
from perturn.errors import ConfigError, RunError, required
from perturn.serve.exchange import Refusal
from perturn.serve.record import Record
from perturn.serve.reward_call import Judge
from perturn.serve.session_manager import SessionManager
from perturn.serve.settings import LOOPBACK, ServeSettings
from perturn.table import locate, require_library
from perturn.types import Engine, Sampling, Task, Trajectory

if TYPE_CHECKING:
    import uvicorn

_T = TypeVar("_T")
_BACKLOG = 2048
_KEEP_ALIVE = 120
"""Seconds after which an idle connection is closed; longer than the limit of common HTTP clients."""


class Endpoint:
    """Serves a policy through OpenAI's and Anthropic's APIs, and records each session as a trajectory.

    An agent program needs only the base URL `url(session)` and an API key, `key` or `session_key(session)`:

        with Endpoint(engine) as endpoint:
            session = endpoint.new_session(Task("guess-7"), sample=0, seed=1)
            ...  # OPENAI_BASE_URL=endpoint.url(session) OPENAI_API_KEY=endpoint.session_key(session)
            trajectory = endpoint.end_session(session, reward=1.0)

    All methods may be called from any thread.
    """

    def __init__(
        self,
        engine: Engine | EngineProcess,
        settings: ServeSettings | None = None,
        *,
        key: str | None = None,
        record: str | Path | None = None,
        reward: Judge | None = None,
        environment: str = "agent",
        seed: int = 0,
    ) -> None:
        """Start the server in a thread.

        Args:
            engine: Engine that answers prompts. Do not use the engine elsewhere while the endpoint is open. The engine
                stays open when the endpoint is closed.
            settings: Address and limits; None: a free port on localhost.
            key: API key that clients must send; None: a new random key. The key is only kept in memory.
            record: Folder for the episodes of sessions that clients open; None: do not record them.
            reward: Function that returns the reward of each finished episode, instead of rewards that clients post.
            environment: Name of the agents' environment, recorded in the trajectories.
            seed: Seed from which the seeds of sessions that clients open are derived.

        Raises:
            PerturnError: If starlette or uvicorn is missing, the address is in use, or another machine can reach it and
                no key was given.
        """
        self.settings = settings or ServeSettings()
        socket_ = _listening(self.settings, key)
        self.key = key or secrets.token_hex(20)
        """API key that clients must send."""
        try:
            self._record = None if record is None else Record(Path(record), environment)
        except BaseException:
            socket_.close()
            raise
        self.lost = self._record.lost if self._record else 0
        """Number of sessions that an earlier, killed endpoint left open in the record folder."""
        host, port = socket_.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{port}"
        """Address of the server."""
        self._sessions = SessionManager(engine, self.settings, self._record, reward, environment, seed)
        app = locate("perturn.serve.app:make_app")(self._sessions, self.key)
        self._server: uvicorn.Server = _server(app)
        self._began: Future[None] = Future()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run_loop, args=(socket_,), name="perturn-serve", daemon=True
        )
        self._begin(socket_)

    def new_session(
        self, task: Task, sample: int = 0, seed: int = 0, *, sampling: Sampling | None = None
    ) -> str:
        """Open a session for one episode, and return the session's name.

        `end_session` returns the episode, which is not written to the record folder.

        Args:
            task: Task that the agent plays.
            sample: Number of the episode among the episodes of the same task.
            seed: Seed of the episode, with the same effect as in an episode that Perturn plays itself.
            sampling: Sampling settings of all answers; None: the settings in the agent's requests.
        """
        name = secrets.token_urlsafe(12)
        self._run(lambda: self._sessions.open(name, task, sample, seed, sampling=sampling, is_kept=True))
        return name

    def url(self, session: str | None = None) -> str:
        """Return the base URL for OpenAI's client. Anthropic's client needs it without `/v1`."""
        return f"{self.address}/v1" if session is None else f"{self.address}/s/{session}/v1"

    def session_key(self, session: str) -> str:
        """Return an API key that is valid for one session only."""
        return f"{self.key}.{session}"

    def trajectory(self, session: str) -> Trajectory:
        """Return the episode of an open session so far; its status is UNFINISHED.

        Raises:
            RunError: If there is no such session, or it has ended.
        """
        return self._run(lambda: self._sessions.so_far(session))

    def summary(self, session: str) -> dict[str, Any]:
        """Return the state of an open session, as `GET /s/ID` does: its turns, and why requests began new sequences.

        Raises:
            RunError: If there is no such session, or it has ended.
        """
        return self._run(lambda: self._sessions.known(session).summary())

    def end_session(
        self,
        session: str,
        *,
        reward: float | None = None,
        success: bool | None = None,
        error: str | None = None,
        truncated: bool = False,
    ) -> Trajectory:
        """End a session of `new_session`, and return its episode. Later requests of its agent are rejected.

        Args:
            session: Name of the session.
            reward: Reward of the episode; None: the reward that the agent posted, or 0.
            success: Whether the task is solved; None: the value that the agent posted. If it posted none, the reward of
                the episode must be at least 1; without such a reward, the sum of the turns' rewards.
            error: Error of the episode, such as a crash of the agent; the episode is then FAILED.
            truncated: Whether a limit ended the session.

        Raises:
            RunError: If there is no such session, or its episode was already returned.
        """
        return self._wait(self._sessions.collect(session, reward, success, error, truncated))

    def counts(self) -> dict[str, Any]:
        """Return counters: open sessions, turns, and ended sessions by reason."""
        return self._run(self._sessions.summary)

    def close(self) -> None:
        """Stop serving. Sessions that clients left open are recorded as FAILED; the engine stays open."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._loop.call_soon_threadsafe(self._closing.set)
        thread.join()
        if self._record is not None:
            self._record.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, listening: socket.socket) -> None:
        """Start the thread, and wait until it serves; if it cannot, close what is open and raise its exception."""
        assert self._thread is not None
        self._thread.start()
        try:
            self._began.result()
        except BaseException:
            self._thread = None
            listening.close()
            if self._record is not None:
                self._record.close()
            raise

    def _run_loop(self, listening: socket.socket) -> None:
        """Run the server in an event loop of this thread; the loop is uvloop's if that is installed."""
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve(listening))
        except BaseException as error:  # whoever makes the endpoint waits for its beginning
            if self._began.done():
                raise
            self._began.set_exception(error)

    async def _serve(self, listening: socket.socket) -> None:
        """Serve until `close`."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._sessions.start()
        serving = asyncio.ensure_future(self._server.serve([listening]))
        expiring = asyncio.ensure_future(self._expire())
        self._began.set_result(None)
        await self._closing.wait()
        expiring.cancel()
        await self._sessions.stop()
        self._server.should_exit = True
        await serving

    async def _expire(self) -> None:
        """Cut sessions that exceed a time limit, at regular intervals."""
        pause = min(1.0, self.settings.idle_seconds / 4, self.settings.session_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            self._sessions.expire()

    def _run(self, work: Callable[[], _T]) -> _T:
        """Call a function in the event loop, and return its result."""

        async def do() -> _T:
            return work()

        return self._wait(do())

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._thread is None:
            work.close()
            raise RunError("the endpoint is closed; make another.")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except Refusal as error:
            raise RunError(error.message) from None


def check_address(settings: ServeSettings, key: str | None) -> None:
    """Check that an endpoint can be opened, before a model is loaded for it.

    Args:
        settings: Address of the endpoint.
        key: API key that clients must send; None: a random key.

    Raises:
        PerturnError: As `Endpoint` does.
    """
    _listening(settings, key).close()


def _check_key(key: str | None, host: str) -> None:
    """Check the API key and the address.

    Raises:
        ConfigError: If other machines can reach the address and no key is given, or clients cannot send the key. The
            message does not contain the key.
    """
    if host not in LOOPBACK:
        reader = f"an endpoint at {host} can be reached from elsewhere"
        required(key, "PERTURN_API_KEY", reader, "set it to an API key of your choice, or serve at 127.0.0.1")
    if key is not None and not re.fullmatch(r"[A-Za-z0-9_-]{8,200}", key):
        raise ConfigError("an API key must be 8 to 200 letters, digits, _ or -; what was given is not shown.")


def _listening(settings: ServeSettings, key: str | None) -> socket.socket:
    """Return a socket that listens at the address in the settings.

    Raises:
        PerturnError: If a library is missing, or the address or the API key cannot be used.
    """
    for package in ("starlette", "uvicorn"):
        require_library(package, "an endpoint", "serve")
    _check_key(key, settings.host)
    try:
        kind = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        made = socket.create_server((settings.host, settings.port), family=kind, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be listened at: {error.strerror or error}; choose another port "
            "(0: any that is free) or host."
        ) from None
    made.setblocking(False)
    return made


def _server(app: Any) -> uvicorn.Server:
    """Return the HTTP server, which writes no log."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
