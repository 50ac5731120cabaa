"""The HTTP application of an endpoint: routes, API keys, and responses to clients."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictFloat
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from perturn.errors import StorageError
from perturn.io.plain_data import error_text
from perturn.serve.agent_session import Session
from perturn.serve.exchange import Ask, Refusal, Reply, check_name
from perturn.serve.protocols.chat import Chat
from perturn.serve.protocols.common import OwnBody, ServedProtocol, check_plain, read_body
from perturn.serve.protocols.messages import Messages
from perturn.serve.protocols.responses import Responses
from perturn.serve.session_manager import SessionManager
from perturn.types import Task, failed

_logger = logging.getLogger(__name__)

PROTOCOLS: Mapping[str, ServedProtocol] = {
    "/v1/chat/completions": Chat(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
"""Path -> protocol of a model provider."""
HEADER = "x-perturn-session"
"""HTTP header that names the session of a request."""
_GONE = 499
"""HTTP status of a request whose client has disconnected; no client reads it."""
_SESSION = re.compile(r"/s/([^/]+)")
_MODEL = re.compile(r"(?<=/v1/models/).+")
_Handler = Callable[[SessionManager, str, Request], Awaitable[Response]]


class _Reward(OwnBody):
    reward: StrictFloat | None = None
    response: str | None = None
    choice: Annotated[int, Field(ge=0)] | None = None
    success: StrictBool | None = None
    done: StrictBool | None = None


class _State(OwnBody):
    state: Annotated[str, Field(max_length=10_000)] | None


class _Opening(OwnBody):
    task: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    kind: str = ""
    data: dict[str, Any] = Field(default_factory=dict)
    sample: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


def make_app(sessions: SessionManager, key: str) -> ASGIApp:
    """Make the ASGI application of an endpoint.

    Args:
        sessions: Sessions of the endpoint.
        key: API key that clients must send.
    """
    chat = PROTOCOLS["/v1/chat/completions"]
    routes: dict[str, dict[str, _Handler]] = {
        "/v1/models": {"GET": _models},
        "/v1/models/NAME": {"GET": _model},
        "/s/ID/reward": {"POST": _reward},
        "/s/ID/state": {"PUT": _state},
        "/s/ID": {"PUT": _open, "GET": _show},
        "/s": {"GET": _counts},
        **{path: {"POST": partial(_converse, protocol)} for path, protocol in PROTOCOLS.items()},
    }
    routes |= {f"/s/ID{path}": methods for path, methods in routes.items() if path.startswith("/v1/")}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        session = _SESSION.match(path)
        plain = _MODEL.sub("NAME", f"/s/ID{path[session.end() :]}" if session else path)
        scope["path_params"] = {"session": session[1]} if session else {}
        protocol = next((PROTOCOLS[each] for each in PROTOCOLS if each in path), chat)
        try:
            handler = _handler(routes.get(plain), scope)
            response = await handler(sessions, key, Request(scope, receive))
        except Refusal as error:
            response = _json(protocol.refusal(error), error.status)
            if error.status == 409:  # which clients of OpenAI and Anthropic would repeat
                response.headers["x-should-retry"] = "false"
        except ClientDisconnect:
            response = Response(status_code=_GONE)
        except StorageError as error:
            response = _json(protocol.refusal(Refusal(503, str(error), "not_recorded")), 503)
        except Exception as error:  # noqa: BLE001  a bug here must not break the protocol
            response = _json(protocol.refusal(_unexpected(error)), 500)
        await response(scope, receive, send)

    return app


def _handler(methods: Mapping[str, _Handler] | None, scope: Scope) -> _Handler:
    """Return the handler of a request.

    Raises:
        Refusal: If the path or the method is unknown.
    """
    if methods is not None and scope["method"] in methods:
        return methods[scope["method"]]
    status, said = (404, "Not Found") if methods is None else (405, "Method Not Allowed")
    raise Refusal(status, f"{scope['method']} {scope['path']:.200}: {said}", "not_found")


def _unexpected(error: Exception) -> Refusal:
    """Log an unexpected error, and return it as a rejection with HTTP status 500."""
    _logger.exception("a request failed", exc_info=error)
    return Refusal(500, f"the endpoint failed: {error_text(error)}", "internal_error")


async def _converse(
    protocol: ServedProtocol, sessions: SessionManager, key: str, request: Request
) -> Response:
    """Answer a request for a completion in a provider's protocol."""
    name = _admit(key, request)
    ask = protocol.read(await _body(sessions, request))
    ask, session = sessions.session_of(ask, name)
    position = session.position()
    prompts = await sessions.begin(session, ask, position)
    answering = sessions.answer(session, ask, position, prompts, protocol.new_id())
    if ask.stream:
        return await _streamed(protocol, sessions, request, (session, ask), answering)
    reply = await _unless_gone(request, answering)
    return _json(protocol.write(reply, ask), session=session)


async def _unless_gone(request: Request, answering: Coroutine[Any, Any, Reply]) -> Reply:
    """Wait for an answer; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: If the client has disconnected.
    """
    task = asyncio.current_task()
    assert task is not None

    def give_up(_: asyncio.Future[Any]) -> None:
        task.cancel()

    gone = asyncio.ensure_future(request.receive())  # after the body, the next event is a disconnect
    gone.add_done_callback(give_up)
    try:
        return await answering
    except asyncio.CancelledError:
        if gone.done():
            task.uncancel()
            raise ClientDisconnect from None
        raise
    finally:
        gone.remove_done_callback(give_up)
        gone.cancel()


async def _streamed(
    protocol: ServedProtocol,
    sessions: SessionManager,
    request: Request,
    asked: tuple[Session, Ask],
    answering: Coroutine[Any, Any, Reply],
) -> Response:
    """Answer as a stream of server-sent events, with comments as heartbeats while the answer is not ready."""
    session, ask = asked
    answered = asyncio.ensure_future(answering)
    gone = asyncio.ensure_future(request.receive())
    is_handed_on = False
    try:
        patience = sessions.settings.heartbeat_seconds
        await asyncio.wait({answered, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return _stream(_all(protocol.events(answered.result(), ask)), session)
        if gone.done():
            raise ClientDisconnect
        is_handed_on = True
        return _stream(_events(sessions, protocol, ask, answered), session)
    finally:
        gone.cancel()
        if not is_handed_on:
            answered.cancel()


async def _events(
    sessions: SessionManager, protocol: ServedProtocol, ask: Ask, answered: asyncio.Future[Reply]
) -> AsyncIterator[str]:
    """Yield heartbeat comments until the answer is ready, and then its events."""
    try:
        while True:
            yield ": waiting\n\n"
            await asyncio.wait({answered}, timeout=sessions.settings.heartbeat_seconds)
            if answered.done():
                break
        try:
            reply = answered.result()
        except Refusal as error:
            yield protocol.failed(error)
            return
        except Exception as error:  # noqa: BLE001  a bug here must not break the protocol
            yield protocol.failed(_unexpected(error))
            return
        for event in protocol.events(reply, ask):
            yield event
    finally:
        answered.cancel()


async def _all(events: Any) -> AsyncIterator[str]:
    for event in events:
        yield event


async def _models(sessions: SessionManager, key: str, request: Request) -> Response:
    """Return a list of models with the policy as its only entry."""
    _admit(key, request)
    model = _entry(sessions)
    name = model["id"]
    return _json({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})


async def _model(sessions: SessionManager, key: str, request: Request) -> Response:
    """Return the policy's entry, whatever name the request gives, as requests for answers may give any name."""
    _admit(key, request)
    return _json(_entry(sessions))


def _entry(sessions: SessionManager) -> dict[str, Any]:
    """Return the policy as an entry of a list of models, in the form of both providers."""
    name = sessions.engine.name
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "owned_by": "perturn",
    }


async def _reward(sessions: SessionManager, key: str, request: Request) -> Response:
    """Set the reward of a turn or of the episode; `done`, or by default the episode's reward, ends the session."""
    name = _named(key, request)
    given = read_body(_Reward, await _body(sessions, request))
    if given.reward is None and given.success is None and given.done is None:
        raise Refusal(400, "the body has no reward, success or done; give one of them.", "invalid_value")
    if given.reward is None and given.response is not None:
        raise Refusal(
            400,
            "response names a turn, but the body has no reward for it; give reward.",
            "invalid_value",
            "reward",
        )
    if given.response is None and given.choice is not None:
        raise Refusal(400, "choice names a choice of a response; give response.", "invalid_value", "response")
    session = sessions.known(name)
    if given.reward is not None:
        session.give_reward(given.reward, given.response, given.choice)
    if given.success is not None:
        session.success = given.success
    if given.reward is not None or given.success is not None:
        session.unrecorded = None
    whole = given.reward is not None and given.response is None
    done = whole if given.done is None else given.done
    ended = await sessions.finish(session, "ended") if done else None
    cause = {"error": ended.error} if ended is not None and failed(ended) else {}
    return _json({"session": session.id, "reward": session.reward, "done": done, **cause})


async def _state(sessions: SessionManager, key: str, request: Request) -> Response:
    """Set the state key of the next request."""
    name = _named(key, request)
    given = read_body(_State, await _body(sessions, request))
    session = sessions.find_or_open(name)
    session.give_state(given.state)
    return _json({"session": session.id, "state": session.next_state})


async def _open(sessions: SessionManager, key: str, request: Request) -> Response:
    """Open a session for a task."""
    name = _named(key, request)
    check_name(name)
    given = read_body(_Opening, await _body(sessions, request))
    check_plain(given.data, "data")
    session = sessions.open(
        name, Task(given.task or name, given.kind, data=given.data), given.sample, given.seed
    )
    return _json(session.summary())


async def _show(sessions: SessionManager, key: str, request: Request) -> Response:
    """Return the current state of a session."""
    return _json(sessions.known(_named(key, request)).summary())


async def _counts(sessions: SessionManager, key: str, request: Request) -> Response:
    """Return the counters of the endpoint."""
    _admit(key, request)
    return _json(sessions.summary())


def _admit(key: str, request: Request) -> str | None:
    """Check the API key, and return the session that the path, the header or the key names; None if none does.

    Raises:
        Refusal: If the key is wrong, or path, header and key name different sessions.
    """
    headers = {name: value.decode("latin-1") for name, value in request.scope["headers"]}
    given = headers.get(b"x-api-key") or headers.get(b"authorization", "").removeprefix("Bearer ")
    own, _, of_key = given.partition(".")
    if not secrets.compare_digest(own.encode(), key.encode()):
        raise Refusal(
            401, "the API key is wrong; the endpoint printed its own when it started.", "invalid_api_key"
        )
    named = {request.path_params.get("session"), headers.get(HEADER.encode()), of_key or None} - {None}
    if len(named) > 1:
        raise Refusal(
            403,
            f"path, header {HEADER} and key name different sessions: {', '.join(sorted(map(str, named)))}. A key with "
            "a session belongs to one agent.",
            "session_mismatch",
        )
    return next(iter(named), None)


def _named(key: str, request: Request) -> str:
    _admit(key, request)
    return str(request.path_params["session"])


async def _body(sessions: SessionManager, request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        Refusal: If the body is too large, or does not arrive in time.
    """
    most, seconds, parts, size = sessions.settings.max_body_bytes, sessions.settings.body_seconds, [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise Refusal(413, f"the body is larger than {most} bytes.", "body_too_large")
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {seconds:g} seconds.", "timeout") from None
    return b"".join(parts)


def _stream(events: AsyncIterator[str], session: Session) -> Response:
    headers = {"Cache-Control": "no-cache", HEADER: session.id}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _json(data: Any, status: int = 200, session: Session | None = None) -> Response:
    headers = {} if session is None else {HEADER: session.id}
    return Response(json.dumps(data), status, headers, media_type="application/json")
