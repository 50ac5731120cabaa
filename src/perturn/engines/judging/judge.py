"""A judge: asks a model for ratings until it gives a readable rating, and makes none up."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

from perturn.errors import ConfigError, EngineFailure, RunError
from perturn.types import Action, Engine, Message, Prompt, Sampling

_RATING = re.compile(r"\[\[\s*(-?\d{1,6}(?:\.\d{1,6})?)\s*\]\]")
_AT_ONCE = 64
"""Questions that an engine is asked together; their answers are kept before the next questions are asked."""
_END = 100
"""Characters of an unreadable judgment that are quoted."""


@dataclass(frozen=True)
class Question:
    """A question to a judge."""

    system: str
    text: str
    conversation: str
    """Identity of the rated episode or turn, by which an engine may keep its keys and values."""


@dataclass(frozen=True)
class Judgment:
    """The ratings that a judge gave one question."""

    ratings: tuple[float, ...]
    """The rating of each sample that has one."""
    problems: tuple[str, ...] = ()
    """Why a sample has none, for each that has none."""


@dataclass(frozen=True)
class Judge:
    """Rates texts. A judgment without a rating is asked for again.

    A question that the engine leaves unanswered has no rating. What is wrong with all questions (key, model, rate,
    budget, a server that is down) ends the run with nothing recorded, as with the engine `api`.
    """

    engine: Engine
    sampling: Sampling
    scale: tuple[float, float]
    """Lowest and highest rating."""
    settings: str
    """The section that has the engine's settings, for messages."""
    samples: int = 1
    """Ratings of one question."""
    tries: int = 3
    """Judgments of one sample, at most."""
    answers: MutableMapping[str, str] = field(default_factory=dict)
    """Earlier answers by the digest of their question; the mapping grows."""

    def rate(self, questions: Sequence[Question]) -> list[Judgment]:
        """Return the judgment of each question, in order.

        Raises:
            RunError: If no question at all can be answered.
        """
        keys = [(number, sample) for number in range(len(questions)) for sample in range(self.samples)]
        ratings: dict[tuple[int, int], float] = {}
        problems: dict[tuple[int, int], str] = {}
        for attempt in range(self.tries):  # an equal prompt with an equal seed is not sent again
            left = [key for key in keys if key not in ratings and key not in problems]
            prompts = [_prompt(questions[number], sample * self.tries + attempt) for number, sample in left]
            for key, said in zip(left, self._ask(prompts), strict=True):
                if isinstance(said, EngineFailure):
                    problems[key] = f"the judge gave no judgment: {said}"
                elif (rating := read_rating(said, self.scale)) is not None:
                    ratings[key] = rating
                elif attempt == self.tries - 1:
                    problems[key] = self._unread(said)
        judgments: list[Judgment] = []
        for number in range(len(questions)):
            its = [(number, sample) for sample in range(self.samples)]
            given = tuple(ratings[key] for key in its if key in ratings)
            judgments.append(Judgment(given, tuple(problems[key] for key in its if key in problems)))
        return judgments

    def _ask(self, prompts: Sequence[Prompt]) -> list[str | EngineFailure]:
        """Return the judgments, from earlier answers or from new ones."""
        digests = [self._digest(prompt) for prompt in prompts]
        found: dict[str, str | EngineFailure] = {}
        new = {
            each: prompt for each, prompt in zip(digests, prompts, strict=True) if each not in self.answers
        }
        for start in range(0, len(new), _AT_ONCE):
            some = list(new.items())[start : start + _AT_ONCE]
            for (digest, _), answer in zip(some, self._generate([one for _, one in some]), strict=True):
                if isinstance(answer, EngineFailure):
                    found[digest] = answer
                else:
                    self.answers[digest] = answer.text
        return [found[each] if each in found else self.answers[each] for each in digests]

    def _generate(self, prompts: Sequence[Prompt]) -> list[Action | EngineFailure]:
        try:
            return self.engine.generate(prompts, self.sampling)
        except (ConfigError, RunError) as error:
            raise RunError(f"the judge cannot be asked: {error} ({self.settings}.)") from error
        finally:
            for prompt in prompts:
                self.engine.forget(prompt.conversation)

    def _digest(self, prompt: Prompt) -> str:
        """Return a digest of all that an answer depends on."""
        sampling = self.sampling
        told = [each["content"] for each in (*prompt.messages, *prompt.observation)]
        decoding = [sampling.temperature, sampling.top_p, sampling.max_new_tokens]
        text = json.dumps([self.engine.name, decoding, prompt.seed, told])
        return hashlib.sha256(text.encode()).hexdigest()

    def _unread(self, said: str) -> str:
        low, high = self.scale
        return (
            f"the judge gave no rating from {low:g} to {high:g}, such as [[{_between(low, high):g}]], in {self.tries} "
            f"judgments, the last of which ends with {said[-_END:]!r}"
        )


def read_rating(judgment: str, scale: tuple[float, float]) -> float | None:
    """Return the rating in a judgment; None if it has none, has two that differ, or is off the scale."""
    found = {float(number) for number in _RATING.findall(judgment)}
    if len(found) != 1:
        return None
    (rating,) = found
    return rating if scale[0] <= rating <= scale[1] else None


def _prompt(question: Question, seed: int) -> Prompt:
    system: Message = {"role": "system", "content": question.system}
    asked: Message = {"role": "user", "content": question.text}
    return Prompt((system,), (), (asked,), seed=seed, conversation=f"{question.conversation}/{seed}")


def _between(low: float, high: float) -> float:
    """Return a rating for an example, in whole numbers where there is one."""
    return float(round(low + 0.7 * (high - low))) if high - low >= 1 else low + 0.7 * (high - low)
