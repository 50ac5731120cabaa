"""An engine that asks an OpenAI-compatible chat-completions server, for baselines and teacher models.

The official client does the retries, with jittered back-off and `Retry-After`. The API key is read from an
environment variable when the engine is made. No setting holds the key, and the server's texts are redacted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai

from perturn.engines.api.completion import read_completion, read_usage, to_chat
from perturn.engines.api.ledger import Ledger
from perturn.engines.api.limited_client import LimitedClient, OversizedAnswer
from perturn.engines.api.settings import ApiSettings
from perturn.engines.event_loop import EventLoop
from perturn.engines.prompt_failures import says_context_full
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.errors import (
    BudgetError,
    ConfigError,
    ContextFull,
    DataError,
    EngineFailure,
    PerturnError,
    PromptRejected,
    RunError,
)
from perturn.formats.chat_messages import read_answer
from perturn.types import Action, Prompt, Sampling

_UNSUPPORTED = {"unsupported_parameter", "unsupported_value", "unknown_parameter"}
"""Error codes of faults that occur with every request, whatever its prompt."""
_OF_PROMPT = {400, 413, 422, 500}
"""HTTP statuses with which servers reject a prompt that is too long for the model; llama.cpp sends 500."""
_COUNTED = 100_000
"""Largest number of conversations whose token counts are stored; beyond it, the oldest are dropped."""
_MOMENT_S = 0.01
"""Seconds between two looks at the requests in flight."""
_OUTAGE = 3
"""Number of consecutive prompts without an answer after which the server counts as down."""


class ApiEngine:
    """Answers prompts through a server, with many requests at the same time.

    Actions have text and tool calls, but no token ids and logprobs. A fault of one prompt fails this prompt alone. A
    fault that concerns all prompts (key, model, rate, quota, budget, a server that is down) ends the run. No episode
    is then recorded as failed, and the same command continues the run once the fault is fixed.
    """

    def __init__(
        self, model: str, settings: ApiSettings, *, stop: Sequence[str] = (), ledger: Path | None = None
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            model: Name of the model at the server.
            settings: Address, limits and prices of the server.
            stop: Texts that end an answer; used if the settings have no stop texts.
            ledger: File that records spent tokens and answers; an existing file is read first. None: no file.

        Raises:
            ConfigError: If the API key is missing.
        """
        self.name = f"{model}@{settings.host}"
        self._prompt_tokens: dict[str, int] = {}
        self._answer_tokens: dict[str, int] = {}
        self.abilities = EngineAbilities(
            concurrent_calls=settings.concurrency,
            response_formats=frozenset({"json_object", "json_schema"}),
            reads_thoughts=False,
            prompt_tokens=self._prompt_tokens,
            answer_tokens=self._answer_tokens,
        )
        self._model, self._settings = model, settings
        self._stop = list(stop if settings.stop is None else settings.stop)
        self._key = settings.read_key()
        self._ledger = Ledger(ledger)
        self._free = asyncio.Semaphore(settings.concurrency)
        self._in_flight = 0
        self._unanswered = 0
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=settings.base_url,
            timeout=settings.timeout,
            max_retries=settings.max_retries,
            http_client=LimitedClient(settings.timeout, settings.requests_per_minute),
        )
        self._loop: EventLoop | None = EventLoop("perturn-api")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action or failure per prompt, in order.

        Raises:
            BudgetError: If the budget is spent. Requests that were already sent are first answered and counted.
            PerturnError: If a fault concerns all prompts, such as a wrong key.
        """
        if self._loop is None:
            raise RunError(f"engine {self.name} is closed; make another.")
        return self._loop.run(self._answer_all(prompts, sampling))

    def forget(self, conversation: str) -> None:
        """Delete the stored token counts of a conversation that has ended."""
        self._prompt_tokens.pop(conversation, None)
        self._answer_tokens.pop(conversation, None)

    def close(self) -> None:
        """Release the connections and the ledger."""
        if self._loop is not None:
            self._loop.run(self._client.close())
            self._loop.close()
            self._loop = None
            self._ledger.close()

    async def _answer_all(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[Action | EngineFailure]:
        ends: list[PerturnError] = []
        answers = await asyncio.gather(*(self._answer(prompt, sampling, ends) for prompt in prompts))
        if ends and isinstance(ends[0], BudgetError):
            while self._in_flight:  # the new error also counts the requests of concurrent calls
                await asyncio.sleep(_MOMENT_S)
            raise self._spent_budget() or ends[0]
        if ends:
            raise ends[0]
        return [answer for answer in answers if answer is not None]

    async def _answer(
        self, prompt: Prompt, sampling: Sampling, ends: list[PerturnError]
    ) -> Action | EngineFailure | None:
        """Return the answer to one prompt; None after an error that must end the run.

        Such an error is appended to `ends`. Then no new request is sent, but requests that were already sent are
        awaited, since they are paid for.
        """
        body = self._body(prompt, sampling)
        told = {
            key: value for key, value in body.items() if key != "top_p" or value != 1
        }  # 1 changes no answer
        identity = [prompt.conversation, prompt.seed, self._settings.base_url, told]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        if (known := self._ledger.answers.get(digest)) is not None:
            if any(usage := self._ledger.usage[digest]):
                self._count(prompt.conversation, *usage)
            return self._action(known)
        async with self._free:
            if ends:
                return None
            self._in_flight += 1
            try:
                return await self._ask(body, digest, prompt.conversation)
            except PerturnError as error:
                ends.append(error)
                return None
            finally:
                self._in_flight -= 1

    async def _ask(self, body: dict[str, Any], digest: str, conversation: str) -> Action | EngineFailure:
        if spent := self._spent_budget():
            raise spent
        messages = body.pop("messages")
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=self._model, messages=messages, extra_body=body
            )
        except openai.OpenAIError as error:
            return self._failure(error)
        except OversizedAnswer as error:
            return self._unanswerable(f"the answer was not read: {error}")
        return self._read(raw.http_response.content, digest, conversation)

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        """Return the parameters of the request for a prompt; the setting `request` overrides them."""
        body = {
            "model": self._model,
            "messages": to_chat(prompt),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,  # also 1, since a server may have another default
            "max_tokens": sampling.max_new_tokens,
            "seed": prompt.seed % 2**31,  # some servers read the seed as a signed 32-bit number
        }
        if sampling.top_p == 1 and self._settings.request.get("temperature", 1) is None:
            del body["top_p"]  # a model that rejects a temperature usually rejects this too
        if self._stop:
            body["stop"] = self._stop
        if prompt.stop:
            body["stop"] = [*self._stop, *prompt.stop]
        if prompt.response_format:
            body["response_format"] = dict(prompt.response_format)
        if prompt.template_kwargs:
            body["chat_template_kwargs"] = dict(prompt.template_kwargs)
        if prompt.tools:
            body["tools"] = [dict(tool) for tool in prompt.tools]
        return {key: value for key, value in (body | self._settings.request).items() if value is not None}

    def _read(self, body: bytes, digest: str, conversation: str) -> Action | EngineFailure:
        """Record the cost and the text of an answer, and return the answer as an action."""
        try:
            completion = read_completion(body)
        except DataError as error:
            said = self._redact(str(error))
            return self._unanswerable(f"what came is no chat completion; is engine.base_url right? {said}")
        self._unanswered = 0
        choice = completion["choices"][0]
        answer, why = None, "the server's content filter cut the answer."
        if choice.get("finish_reason") != "content_filter":
            try:
                answer = self._keep(choice)
            except DataError as error:  # for example, an image in the answer
                why = self._redact(str(error))
        usage = read_usage(completion)
        if usage is None and (self._settings.max_tokens_total or self._settings.max_cost):
            raise RunError(
                f"{self._settings.host} does not say how many tokens per answer cost, or says what cannot be "
                f"({completion.get('usage')!r:.100}), so no budget can be kept; "
                "remove engine.max_tokens_total and engine.max_cost."
            )
        self._ledger.add(digest, answer, *(usage or (0, 0)))
        if usage is not None:
            self._count(conversation, *usage)
        if answer is None:
            return EngineFailure(f"{self.name}: {why}")
        return self._action(answer)

    def _count(self, conversation: str, asked: int, said: int) -> None:
        """Store the token counts of the newest prompt and answer of a conversation.

        Args:
            conversation: Identity of the conversation.
            asked: Tokens of the prompt.
            said: Tokens of the answer.
        """
        for counts, tokens in ((self._prompt_tokens, asked), (self._answer_tokens, said)):
            counts[conversation] = tokens
            if len(counts) > _COUNTED:
                counts.pop(next(iter(counts)), None)

    def _keep(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return a choice in the form of the ledger; the API key is redacted in case the server echoed it."""
        action = read_answer(choice["message"], "answer")
        answer = {
            "text": action.text,
            "ended": choice.get("finish_reason") != "length",
            "tool_calls": list(action.tool_calls),
            **({"reasoning": action.reasoning} if action.reasoning else {}),
        }
        cleaned: dict[str, Any] = json.loads(self._redact(json.dumps(answer)))
        return cleaned

    def _action(self, answer: Mapping[str, Any]) -> Action:
        """Return an answer of the ledger as an action."""
        thought = answer.get("reasoning", "") if self._settings.keep_thoughts else ""
        return Action(
            answer["text"],
            ended=answer["ended"],
            tool_calls=tuple(answer["tool_calls"]),
            reasoning=thought,
        )

    def _failure(self, error: Exception) -> EngineFailure:
        """Return the failure if a client's error concerns one prompt.

        Raises:
            PerturnError: If the error concerns all prompts.
        """
        status, code = getattr(error, "status_code", None), str(getattr(error, "code", None))
        settings, said = self._settings, self._said(error)
        host, retries, key = settings.host, settings.max_retries, settings.api_key_env
        unreached = isinstance(error, openai.APIConnectionError) and not isinstance(
            error, openai.APITimeoutError
        )
        concern_all: tuple[tuple[bool, type[PerturnError], str], ...] = (
            (
                status in (401, 403),
                ConfigError,
                f"{host} refuses the key ({status}: {said}); check "
                f"{f'environment variable {key}' if key else 'engine.api_key_env'}.",
            ),
            (
                status == 404,
                ConfigError,
                f"{host} has no model {self._model!r} ({status}: {said}); check model.name and engine.base_url.",
            ),
            (
                status in (400, 422) and code in _UNSUPPORTED,
                ConfigError,
                f"{host} does not take a parameter of ours ({status}: {said}); leave it out or replace it by setting "
                "engine.request={max_tokens: null, max_completion_tokens: 1024, top_p: null} or engine.stop=[].",
            ),
            (
                status == 402 or code == "insufficient_quota",
                RunError,
                f"the account at {host} has no credit left ({status}: {said}); add some, then go on.",
            ),
            (
                status == 429,
                RunError,
                f"{host} still limits the rate after {retries} retries ({status}: {said}); set "
                "engine.requests_per_minute or lower engine.concurrency, then run the same command to go on.",
            ),
            (
                unreached,
                RunError,
                f"{host} cannot be reached ({said}, {retries} retries); check engine.base_url and the network, "
                "then run the same command to go on.",
            ),
        )
        for applies, kind, text in concern_all:
            if applies:
                raise kind(text) from None
        if status in _OF_PROMPT and says_context_full(said, code, getattr(error, "type", None)):
            self._unanswered = 0
            return ContextFull(
                f"{self.name} has no room for the prompt and an answer of max_new_tokens ({status}: {said}); lower the "
                "turn limit or max_new_tokens, or take a model with a longer context."
            )
        if status is not None and status < 500 and status not in (408, 409):
            self._unanswered = 0
            return PromptRejected(f"{self.name} refused the prompt ({status}: {said}).")
        return self._unanswerable(f"{said} after {retries} retries")

    def _unanswerable(self, what: str) -> EngineFailure:
        """Return the failure of a prompt that got no answer.

        Raises:
            RunError: If several consecutive prompts got no answer, so that the server counts as down.
        """
        self._unanswered += 1
        if self._unanswered >= _OUTAGE:
            raise RunError(
                f"{self._settings.host} left {self._unanswered} prompts in a row without an answer, the last with: "
                f"{what}. Run the same command later to go on."
            )
        return EngineFailure(f"{self.name} did not answer: {what}")

    def _said(self, error: Exception) -> str:
        """Return the text of an error on one line, with the key redacted, cut to 300 characters."""
        body = getattr(error, "body", None)
        text = body.get("message") if isinstance(body, dict) else None
        line = self._redact(" ".join(str(text or error).split()))
        return line if len(line) <= 300 else f"{line[:300]}…"

    def _redact(self, text: str) -> str:
        if self._key is None or len(self._key) < self._settings.SECRET_LENGTH:
            return text
        return text.replace(self._key, "[API key]")

    def _spent_budget(self) -> BudgetError | None:
        """Return an error that names the spent budgets and the current counts; None if no budget is spent."""
        settings, ledger = self._settings, self._ledger
        cost = settings.cost(ledger.prompt_tokens, ledger.completion_tokens)
        over = [
            (f"{spent:.10g} of engine.{name}={limit:.10g}", f"engine.{name}={2 * max(spent, limit):.10g}")
            for name, spent, limit in (
                ("max_tokens_total", ledger.tokens, settings.max_tokens_total),
                ("max_cost", cost, settings.max_cost),
            )
            if limit is not None and spent >= limit
        ]
        if not over:
            return None
        facts, raised = (" and ".join(part) for part in zip(*over, strict=True))
        return BudgetError(
            f"the budget is spent: {facts} after {ledger.requests} requests; what was answered is kept, and "
            f"the same command with a higher limit goes on, such as {raised}."
        )
