"""Pass requests to the engine and its answers back to waiting clients."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from perturn.engines.engine_process import EngineLine, EngineProcess
from perturn.engines.engine_thread import Answered, EngineThread, explained
from perturn.episodes.engine_abilities import abilities_of
from perturn.episodes.tool_calls import as_text, understand
from perturn.errors import EngineFailure
from perturn.io.plain_data import fault, mended
from perturn.serve.exchange import Answer, Ask, Call, Refusal, Reply
from perturn.serve.settings import ServeSettings
from perturn.types import Action, Engine, Prompt, Sampling

_VARIABLES = 64
"""Largest number of different `chat_template_kwargs` of an endpoint, since the template is compiled for each."""
_ITERATIONS = 5
"""Iterations of the event loop after an answer, in which the end of its connection cancels the request."""


class Answering:
    """An engine and the requests that wait for it. Except for the engine's thread, all code runs in the event loop."""

    def __init__(self, engine: Engine | EngineProcess, settings: ServeSettings, counts: Counter[str]) -> None:
        """Start the engine's thread, or connect to its process.

        Args:
            engine: The engine.
            settings: Limits of the endpoint.
            counts: Counters of the endpoint, which are updated.
        """
        self._engine, self.settings, self._counts = engine, settings, counts
        self._loop = loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[Prompt, asyncio.Future[Action]]] = {}
        self._variables: set[str] = set()

        def deliver(answered: Sequence[tuple[Prompt, Answered]]) -> None:
            loop.call_soon_threadsafe(self._arrived, answered)

        self._thread: EngineThread | EngineLine
        if isinstance(engine, EngineProcess):
            self.abilities, self._thread = engine.abilities, engine.connect(self._arrived)
        else:
            self.abilities, self._thread = abilities_of(engine), EngineThread(engine, deliver)

    @property
    def in_flight(self) -> int:
        """Number of prompts that wait for an answer."""
        return len(self._waiting)

    def checked(self, ask: Ask) -> Ask:
        """Check that the endpoint and its engine can serve a request, and return it with the endpoint's own sampling.

        Raises:
            Refusal: If a limit is reached, or the engine does not support a parameter.
        """
        settings = self.settings
        if ask.n > settings.max_choices:
            raise Refusal(
                400, f"n: expected at most {settings.max_choices}, got {ask.n}.", "invalid_value", "n"
            )
        if len(self._waiting) + ask.n > settings.max_calls:
            self._counts["refused"] += 1
            raise Refusal(
                429, f"{len(self._waiting)} requests are answered now; come back later.", "too_many_calls"
            )
        form = ask.response_format
        if form is not None and form["type"] not in self.abilities.response_formats:
            raise Refusal(
                400,
                f"response_format {form['type']!r} is not supported: engine {self._engine.name} cannot keep to a form. "
                "Ask for it in the prompt.",
                "unsupported_parameter",
                "response_format",
            )
        if ask.logprobs and self.abilities.decode is None:
            raise Refusal(400, "logprobs: this engine gives no tokens.", "unsupported_parameter", "logprobs")
        if ask.template_kwargs:
            variables = repr(sorted(ask.template_kwargs.items()))
            if len(self._variables) >= _VARIABLES and variables not in self._variables:
                raise Refusal(
                    400, f"more than {_VARIABLES} different values.", "invalid_value", "chat_template_kwargs"
                )
            self._variables.add(variables)
        own: dict[str, Any] = {"temperature": settings.temperature, "top_p": settings.top_p}
        return replace(ask, **{key: value for key, value in own.items() if value is not None})

    async def sampled(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action]:
        """Return the engine's answers to prompts. If the client disconnects, sampling is cancelled.

        Raises:
            PerturnError: If the engine cannot answer a prompt.
            Refusal: If the time limit is exceeded, or the session ends.
        """
        futures = []
        for prompt in prompts:
            future: asyncio.Future[Action] = self._loop.create_future()
            self._waiting[id(prompt)] = prompt, future
            self._thread.submit(prompt, sampling)
            futures.append(future)
        try:
            async with asyncio.timeout(self.settings.request_seconds):
                actions = list(await asyncio.gather(*futures))
            for _ in range(_ITERATIONS):  # the answer is not recorded if its client has just gone
                await asyncio.sleep(0)
            return actions
        except TimeoutError:
            self._counts["timed out"] += 1
            raise Refusal(
                504, f"no answer within {self.settings.request_seconds:g} seconds.", "timeout"
            ) from None
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        finally:
            for prompt in prompts:
                if self._waiting.pop(id(prompt), None) is not None:
                    self._thread.cancel(prompt.conversation)

    def _arrived(self, answered: Sequence[tuple[Prompt, Answered]]) -> None:
        """Pass the engine's answers to the waiting requests."""
        for prompt, answer in answered:
            known, future = self._waiting.pop(id(prompt), (None, None))
            if known is not prompt or future is None or future.done():
                continue
            if isinstance(answer, Action):
                future.set_result(answer)
            else:
                future.set_exception(explained(answer))

    def reply(
        self,
        response: str,
        ask: Ask,
        prompts: Sequence[Prompt],
        actions: Sequence[Action],
        answers: tuple[Answer, ...],
    ) -> Reply:
        """Return the reply to a request, with the numbers of its tokens.

        Args:
            response: Id of the response.
            ask: The request.
            prompts: Prompts of the request.
            actions: The engine's action for each prompt.
            answers: The answer for each prompt.
        """
        return Reply(
            response,
            ask.model,
            int(time.time()),
            answers,
            self.abilities.prompt_tokens.get(prompts[0].conversation, 0),
            self._answer_tokens(prompts, actions),
            self._token_texts(actions) if ask.logprobs else (),
        )

    def _token_texts(self, actions: Sequence[Action]) -> tuple[tuple[str, ...], ...]:
        """Return the text of each sampled token `[actions][tokens]`."""
        decode = self.abilities.decode
        assert decode is not None  # otherwise `checked` rejects the request
        return tuple(tuple(decode([token]) for token in action.token_ids or ()) for action in actions)

    def _answer_tokens(self, prompts: Sequence[Prompt], actions: Sequence[Action]) -> int:
        """Return the total number of tokens of the answers; an answer counts 0 if the engine does not report it."""
        counted = self.abilities.answer_tokens
        return sum(
            len(action.token_ids) if action.token_ids else counted.get(prompt.conversation, 0)
            for prompt, action in zip(prompts, actions, strict=True)
        )

    def forget(self, conversations: Sequence[str], ended: Refusal) -> None:
        """Release the engine's state of conversations, and reject their waiting prompts with `ended`."""
        gone = set(conversations)
        for prompt, future in list(self._waiting.values()):
            if prompt.conversation in gone and not future.done():
                future.set_exception(ended)
        for conversation in conversations:
            self._thread.forget(conversation)

    def close(self) -> None:
        """End the engine's thread, or the connection to its process. The engine stays open."""
        self._thread.close()


@lru_cache(1024)
def sampling_of(temperature: float, top_p: float, most: int) -> Sampling:
    """Return the sampling settings of an answer; equal settings share one object."""
    return Sampling(temperature, top_p, most)


def read_action(action: Action, ask: Ask) -> Answer:
    """Convert an engine's action to an answer for the client; parse tool calls, and cut stop texts off.

    Raises:
        EngineFailure: If a log-probability is not finite.
    """
    if not all(map(math.isfinite, action.logprobs or ())):
        raise EngineFailure(
            "the engine gave log-probabilities that are not finite: its weights hold NaN or inf."
        )
    if action.reasoning:
        action = replace(action, reasoning=mended(action.reasoning))
    written = action.text  # with its tool calls, in which a stop text may stand
    if fault((action.text, action.tool_calls), "action") or (action.tool_calls and not ask.reads_calls):
        action = as_text(action)
    elif ask.tools and ask.reads_calls:
        action, _ = understand(action, ask.tools)
    stop = min((each for each in ask.stop if each in written), key=written.find, default=None)
    is_stopped = stop is not None and not action.ended
    return Answer(
        action,
        action.text.partition(str(stop))[0] if is_stopped else action.text,
        tuple(map(_call, action.tool_calls)),
        stop if is_stopped else None,
    )


def _call(call: Mapping[str, Any]) -> Call:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(f"call_{secrets.token_hex(8)}", str(function.get("name", "")), text)
