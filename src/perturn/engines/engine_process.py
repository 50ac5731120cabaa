"""An engine in its own process, so that its work and its caller's do not wait for one interpreter.

A conversation crosses once: a prompt is sent with the turns that came since the last prompt of its conversation.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import queue
import signal
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from socket import socket
from time import monotonic, sleep
from typing import Any

from perturn.engines.engine_thread import Answered, Deliver, EngineWork, explained
from perturn.episodes.engine_abilities import abilities_of
from perturn.errors import PerturnError, RunError
from perturn.types import Action, Engine, Prompt, Sampling, Turn

_HEAD = struct.Struct("!i")
"""Length of a message up to 2 GB, as `Connection` writes and reads it."""
_SOME = 2**20
"""Bytes that are read at once."""
_CLOSE_S = 10.0
"""Seconds that the process may take to end before it is killed."""
_POLL_S = 0.01
"""Seconds between two looks at whether the process has ended."""


class EngineProcess:
    """An engine that runs in another process; an endpoint uses it like an engine."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        """Start the process, and wait until its engine is open.

        Args:
            open_engine: Opens the engine in the process; it is pickled.

        Raises:
            PerturnError: If the engine cannot be opened, or the process ends before it is open.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(theirs, open_engine), name="perturn-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            opened = self._pipe.recv()
        except EOFError:
            raise self.ended() from None
        if isinstance(opened, PerturnError):
            self.close()
            raise opened
        self.name, has_texts, abilities = opened
        self.texts: dict[int, str] = {}
        """Texts of the tokens that were sampled so far."""
        self.prompt_tokens: dict[str, int] = {}
        """Tokens of the newest prompt of each open conversation."""
        self._line = EngineLine(self, self._pipe.fileno())
        decode = self._decode if has_texts else None
        self.abilities = replace(abilities, decode=decode, prompt_tokens=self.prompt_tokens)

    def connect(self, deliver: Deliver) -> EngineLine:
        """Return a sender of prompts to the process; `deliver` is called with answers in the running event loop."""
        self._line.connect(deliver)
        return self._line

    def lost(self) -> RunError:
        """Wait, in any thread, until the process is gone; return an error that says how it ended."""
        wait([self._process.sentinel])
        return self.ended()

    def ended(self) -> RunError:
        """Wait for a process whose pipe is closed, and kill it after 10 seconds; return how it ended, as an error.

        Exit codes are polled: `join` waits for ever where the process has closed its sentinel and lives on.
        """
        last, how = monotonic() + _CLOSE_S, ""
        while (code := self._process.exitcode) is None:
            if monotonic() > last:
                how = f"closed its pipe, did not end in {_CLOSE_S:g} seconds, and was killed"
                self._process.kill()
            sleep(_POLL_S)
        if not how:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
        return RunError(f"the process of the engine {how}; does the model fit into memory? Start it again.")

    def close(self) -> None:
        """End the process."""
        self._pipe.close()  # the process ends with its pipe
        self.ended()

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of each token by itself, joined; each must have been sampled before."""
        return "".join(self.texts[each] for each in ids)


class EngineLine:
    """Passes prompts to the process of an engine, as an `EngineThread` does to an engine here; it never blocks."""

    def __init__(self, process: EngineProcess, pipe: int) -> None:
        self._process, self._pipe = process, pipe
        self._unsent, self._got = bytearray(), bytearray()
        self._asked: dict[str, tuple[int, Prompt]] = {}  # by conversation, with the number of the prompt
        self._numbers = count()
        self._sent: dict[str, tuple[Turn, ...]] = {}
        self._lost: RunError | None = None
        self._is_open = False

    def connect(self, deliver: Deliver) -> None:
        """Begin to pass prompts and answers on, in the running event loop."""
        self._deliver, self._loop = deliver, asyncio.get_running_loop()
        self._socket = socket(fileno=os.dup(self._pipe))
        self._socket.setblocking(False)
        self._is_open = True
        self._loop.add_reader(self._socket, self._receive)
        self._flush()  # an order may have been cut in its middle

    def submit(self, prompt: Prompt, sampling: Sampling) -> None:
        """Start answering a prompt; no two at a time are of one conversation."""
        if self._lost is not None:
            self._loop.call_soon(self._deliver, [(prompt, self._lost)])
            return
        turns, sent = prompt.turns, self._sent.get(prompt.conversation, ())
        known = len(sent) if sent == turns[: len(sent)] else 0
        self._sent[prompt.conversation] = turns
        number = next(self._numbers)
        self._asked[prompt.conversation] = number, prompt
        self._send(
            "submit", prompt.conversation, number, replace(prompt, turns=turns[known:]), known, sampling
        )

    def cancel(self, conversation: str) -> None:
        """Stop answering the prompt of a conversation."""
        self._asked.pop(conversation, None)
        self._send("cancel", conversation)

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        self._sent.pop(conversation, None)
        self._process.prompt_tokens.pop(conversation, None)
        self._send("forget", conversation)

    def close(self) -> None:
        """Release the event loop, from any thread; unfinished answers are dropped."""
        self._loop.call_soon_threadsafe(self._release)

    def _send(self, *order: Any) -> None:
        if self._is_open:
            message = pickle.dumps(order)
            self._unsent += _HEAD.pack(len(message)) + message
            self._flush()

    def _flush(self) -> None:
        try:
            with suppress(BlockingIOError):
                del self._unsent[: self._socket.send(self._unsent)]
        except OSError:  # `_receive` sees the end too
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            some = self._socket.recv(_SOME)
        except ConnectionResetError:
            some = b""
        if not some:
            self._end()
            return
        self._got += some
        answered: list[tuple[Prompt, Answered]] = []
        while len(self._got) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._got)[0]
            if len(self._got) < end:
                break
            answers, texts = pickle.loads(self._got[_HEAD.size : end])
            del self._got[:end]
            self._process.texts |= texts
            answered += [each for answer in answers for each in self._of(*answer)]
        if answered:
            self._deliver(answered)

    def _of(
        self, conversation: str, number: int, answer: Answered, tokens: int
    ) -> list[tuple[Prompt, Answered]]:
        """Return an answer with its prompt, unless that was cancelled meanwhile."""
        asked, prompt = self._asked.get(conversation, (None, None))
        if prompt is None or asked != number:
            return []
        del self._asked[conversation]
        self._process.prompt_tokens[conversation] = tokens
        return [(prompt, answer)]

    def _release(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _end(self) -> None:
        """Let all prompts fail once the process has ended; a thread waits for that."""
        self._release()
        self._loop.run_in_executor(None, self._process.ended).add_done_callback(self._fail)

    def _fail(self, ended: asyncio.Future[RunError]) -> None:
        self._lost = lost = ended.result()
        asked, self._asked = list(self._asked.values()), {}
        self._deliver([(prompt, lost) for _, prompt in asked])


def _main(pipe: Connection, open_engine: Callable[[], Engine]) -> None:
    """Open an engine, and answer the prompts of a pipe until its other end is closed."""
    # The terminal's Ctrl-C reaches this process too; the caller ends it after its own work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = open_engine()
    except PerturnError as error:
        pipe.send(error)
        return
    try:
        with suppress(EOFError, ConnectionError):
            _Served(pipe, engine).run()
    finally:
        engine.close()


class _Served:
    """The engine in its process; all is done in one thread, which reads the pipe between two passes of the engine."""

    def __init__(self, pipe: Connection, engine: Engine) -> None:
        self._pipe, self._engine, self._abilities = pipe, engine, abilities_of(engine)
        self._work = EngineWork(engine, self._deliver)
        self._asked: dict[str, tuple[int, Prompt]] = {}
        self._turns: dict[str, tuple[Turn, ...]] = {}
        self._told: set[int] = set()

    def run(self) -> None:
        """Send the engine's name and abilities to the other end, then answer prompts.

        Raises:
            OSError: When the other end is closed, or EOFError.
        """
        plain = replace(self._abilities, decode=None, prompt_tokens={})
        self._pipe.send((self._engine.name, self._abilities.decode is not None, plain))
        self._work.run(self._next_order)

    def _next_order(self, is_idle: bool) -> Callable[[], None]:
        """Return the next order of the other end; see `EngineWork.run`."""
        if not is_idle and not self._pipe.poll():
            raise queue.Empty
        order, conversation, *details = self._pipe.recv()
        if order == "cancel":
            self._asked.pop(conversation, None)
            return partial(self._work.cancel, conversation)
        if order == "forget":
            self._turns.pop(conversation, None)
            return partial(self._engine.forget, conversation)
        number, prompt, known, sampling = details
        turns = (*self._turns.get(conversation, ())[:known], *prompt.turns)
        self._turns[conversation] = turns
        whole = replace(prompt, turns=turns)
        self._asked[conversation] = number, whole
        return partial(self._work.begin, whole, sampling)

    def _deliver(self, answered: Sequence[tuple[Prompt, Answered]]) -> None:
        """Send answers, with the texts of tokens that are new to the other end."""
        answers, sampled = [], set[int]()
        for prompt, answer in answered:
            number, asked = self._asked.get(prompt.conversation, (0, None))
            if asked is not prompt:
                continue
            del self._asked[prompt.conversation]
            if isinstance(answer, Action):
                sampled.update(answer.token_ids or ())
            else:
                answer = explained(answer)
            tokens = self._abilities.prompt_tokens.get(prompt.conversation, 0)
            answers.append((prompt.conversation, number, answer, tokens))
        decode, new = self._abilities.decode, sampled - self._told
        self._told |= new
        self._pipe.send((answers, {each: decode([each]) for each in new} if decode else {}))
