"""A judge that asks a model for ratings, and asks again if an answer has no readable rating."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from perturn.episodes.calls.find_calls import words_after_thought
from perturn.errors import ConfigError, EngineFailure, RunError
from perturn.types import Action, Engine, Message, Prompt, Sampling

_RATING = re.compile(r"\[\[\s*(-?\d{1,6}(?:\.\d{1,6})?)\s*\]\]")
_AT_ONCE = 64
"""Number of questions in one batch; the answers of a batch are stored before the next batch is sent."""
_END = 100
"""Number of characters that an error quotes from the end of an unreadable judgment."""


@dataclass(frozen=True)
class Question:
    """A question to a judge."""

    system: str
    text: str
    conversation: str
    """Identity of the rated episode or turn; an engine may cache keys and values under it."""


@dataclass(frozen=True)
class Judgment:
    """The ratings that a judge gave one question."""

    ratings: tuple[float, ...]
    """Ratings of the samples whose judgment has a readable rating."""
    problems: tuple[str, ...] = ()
    """For each of the other samples, the reason why it has no rating."""


@dataclass(frozen=True)
class Judge:
    """Rates texts. If a judgment has no readable rating, the judge asks the same question again.

    A question that the engine fails to answer gets no rating. A fault that concerns all questions (key, model, rate,
    budget, a server that is down) ends the run and records nothing, as with the engine `api`.
    """

    engine: Engine
    sampling: Sampling
    scale: tuple[float, float]
    """Lowest and highest rating."""
    settings: str
    """Section of the recipe with the engine's settings; named in error messages."""
    samples: int = 1
    """Number of ratings for each question."""
    tries: int = 3
    """Largest number of judgments that are asked for one rating."""
    answers: MutableMapping[str, str] = field(default_factory=dict)
    """Earlier answers by the digest of their question; the judge adds new answers."""
    verdicts: Mapping[str, float] = field(default_factory=dict)
    """Verdict in double brackets -> its rating, such as A -> 1 for `[[A]]`. Empty: the brackets hold the rating."""

    def rate(self, questions: Sequence[Question]) -> list[Judgment]:
        """Return the judgment of each question, in order.

        Raises:
            RunError: If the engine can answer no question, for example because the server is down.
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
                elif (rating := self._read(said)) is not None:
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
        """Return the text or the failure of each prompt; earlier answers are reused, and new answers are stored."""
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
        contents = [each["content"] for each in (*prompt.messages, *prompt.observation)]
        decoding = [sampling.temperature, sampling.top_p, sampling.max_new_tokens]
        text = json.dumps([self.engine.name, decoding, prompt.seed, contents])
        return hashlib.sha256(text.encode()).hexdigest()

    def _read(self, said: str) -> float | None:
        words = words_after_thought(said)
        return read_verdict(words, self.verdicts) if self.verdicts else read_rating(words, self.scale)

    def _unread(self, said: str) -> str:
        low, high = self.scale
        wanted = f"rating from {low:g} to {high:g}, such as [[{_between(low, high):g}]]"
        if self.verdicts:
            wanted = f"single verdict of {', '.join(f'[[{name}]]' for name in self.verdicts)}"
        return f"the judge gave no {wanted}, in {self.tries} judgments, the last of which ends with {said[-_END:]!r}"


def read_rating(judgment: str, scale: tuple[float, float]) -> float | None:
    """Return the rating in a judgment; None if there is no rating, two ratings differ, or it is off the scale."""
    found = {float(number) for number in _RATING.findall(judgment)}
    if len(found) != 1:
        return None
    (rating,) = found
    return rating if scale[0] <= rating <= scale[1] else None


def read_verdict(judgment: str, verdicts: Mapping[str, float]) -> float | None:
    """Return the rating of the verdict in a judgment; None if there is no verdict, or two verdicts differ.

    Args:
        judgment: Text of the judge.
        verdicts: Verdict in double brackets -> its rating.
    """
    found = [rating for name, rating in verdicts.items() if f"[[{name}]]" in judgment]
    return found[0] if len(found) == 1 else None


def _prompt(question: Question, seed: int) -> Prompt:
    system: Message = {"role": "system", "content": question.system}
    asked: Message = {"role": "user", "content": question.text}
    return Prompt((system,), (), (asked,), seed=seed, conversation=f"{question.conversation}/{seed}")


def _between(low: float, high: float) -> float:
    """Return an example of a rating between two bounds; a whole number if the bounds differ by at least 1."""
    return float(round(low + 0.7 * (high - low))) if high - low >= 1 else low + 0.7 * (high - low)
