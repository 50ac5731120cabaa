"""A service of the Tinker API as an engine: token ids in, token ids and log-probabilities out.

A policy is opened by loading its saved state into its own adapters. So a service that samples from the adapters in
training, such as SkyRL's, never mixes both, and a restarted service samples from the saved state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from perturn.engines.context_limit import context_full
from perturn.engines.protocol import Tokens
from perturn.engines.streaming import answer_all, take_all
from perturn.engines.tinker.service import Patience, Rejected, Sampler, Service
from perturn.engines.tinker.service_settings import ServiceSettings
from perturn.engines.tinker.stored_policy import StoredPolicy
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.errors import EngineFailure, RunError
from perturn.types import Action, Prompt, Sampling

_MOMENT = 0.005
"""Seconds that `advance` waits for a first answer."""
_QUIET = 1000
"""Calls of `advance` without an answer after which the service is asked whether it lives."""


class TinkerEngine:
    """Answers prompts by a policy that a service keeps."""

    def __init__(
        self,
        settings: ServiceSettings,
        tokens: Tokens,
        stored: StoredPolicy | None,
        *,
        base: str,
        policy: str,
        context: int | None,
    ) -> None:
        """Open a policy at a service.

        Args:
            settings: The service.
            tokens: Conversation -> tokens.
            stored: The policy; None: the base model.
            base: Name of the base model there.
            policy: Name of the policy in the run.
            context: Longest sequence in tokens; None: not known.

        Raises:
            PerturnError: If the service cannot be reached, or lacks the policy.
        """
        path = f"{settings.host}/{base}" if stored is None else stored.path
        self.name = f"{policy}@{hashlib.sha256(path.encode()).hexdigest()[:12]}"
        self._prompt_tokens: dict[str, int] = {}
        self.abilities = EngineAbilities(
            decode=lambda ids: tokens.text_of(ids), prompt_tokens=self._prompt_tokens
        )
        self._settings, self._tokens, self._limit = settings, tokens, context or 2**31
        self._service = Service(settings)
        self._sampler: Sampler | None = self._open_sampler(base, stored)
        self._open: dict[Future[Any], Prompt] = {}
        self._refused: list[tuple[Prompt, Action | EngineFailure]] = []
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self._patience, self._quiet = Patience(settings, "an answer"), 0

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Take prompts on; `advance` hands out their answers."""
        if self._sampler is None:
            raise RunError(f"engine {self.name} is closed; make another.")
        for prompt in prompts:
            ids = self._tokens.prompt_ids(prompt)
            self._prompt_tokens[prompt.conversation] = len(ids)
            left = self._limit - len(ids)
            if left <= 0:
                self._refused.append((prompt, context_full(len(ids), self._limit)))
                continue
            future = self._sampler.ask(
                ids,
                sorted(self._tokens.end_ids),
                prompt.seed % 2**31,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=min(sampling.max_new_tokens, left),
            )
            self._open[future] = prompt
            future.add_done_callback(self._done.put)

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Wait for a moment; the prompts that were answered, and their answers.

        Raises:
            RunError: If the service answers no more.
        """
        done = take_all(self._done, _MOMENT)
        self._watch(bool(done))
        refused, self._refused = self._refused, []
        asked = [(self._open.pop(future), future) for future in done if future in self._open]
        return [*refused, *((prompt, self._answer(prompt, future)) for prompt, future in asked)]

    def cancel(self, conversation: str) -> None:
        """Wait no more for the answer to the prompt of a conversation."""
        for future, prompt in list(self._open.items()):
            if prompt.conversation == conversation:
                del self._open[future]
                future.cancel()
        self.forget(conversation)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action a prompt, when all are answered."""
        return answer_all(self, prompts, sampling)

    def forget(self, conversation: str) -> None:
        """Do nothing: nothing is kept for a conversation."""
        self._prompt_tokens.pop(conversation, None)

    def close(self) -> None:
        """Wait for nothing more, and have the service drop the policy's adapters."""
        if self._sampler is not None:
            sampler, self._sampler = self._sampler, None
            for future in self._open:
                future.cancel()
            self._open.clear()
            sampler.close()
            self._service.close()

    def _open_sampler(self, base: str, stored: StoredPolicy | None) -> Sampler:
        if stored is None:
            return self._service.sampler(base)
        return self._service.adapter_from(stored.path, False).sampler()

    def _watch(self, answered: bool) -> None:
        """Ask whether the service lives, where it has been quiet for long."""
        self._quiet = 0 if answered or not self._open else self._quiet + 1
        if self._quiet == 0:
            self._patience = Patience(self._settings, "an answer")
        elif self._quiet % _QUIET == 0:
            self._patience.check()

    def _answer(self, prompt: Prompt, future: Future[Any]) -> Action | EngineFailure:
        assert self._sampler is not None
        try:
            found = self._sampler.read(future)
        except Rejected as error:
            return EngineFailure(str(error))
        ids = self._until(prompt.stop, found.ids)
        return self._tokens.action(ids, found.logprobs[: len(ids)], prompt.tools)

    def _until(self, stop: Sequence[str], ids: list[int]) -> list[int]:
        """Return tokens of an answer up to the first with which its text holds one of some texts; all if none does."""
        if not stop:
            return ids
        lengths = (
            length
            for length in range(1, len(ids) + 1)
            if any(text in self._tokens.text_of(ids[:length]) for text in stop)
        )
        return ids[: next(lengths, len(ids))]
