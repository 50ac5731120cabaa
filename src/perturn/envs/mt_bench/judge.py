"""The judge: a model at a server of the chat-completions protocol, which rates one answer from 1 to 10."""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

from typing_extensions import TypedDict

from perturn.bounds import PATH, Bound, bounded
from perturn.engines.api.settings import ApiSettings
from perturn.envs.json_rows import read_rows
from perturn.errors import ConfigError, DataError, EngineFailure, EnvironmentFailure, RunError
from perturn.io.read_input import check_shape, user_path
from perturn.table import require_library
from perturn.types import Engine, Message, Prompt, Sampling

_NAME = re.compile(r"\{(\w+)\}")
_FIRST, _SECOND = ("question", "answer"), ("question_1", "answer_1", "question_2", "answer_2")
HOLDS = {
    "single-v1": _FIRST,
    "single-math-v1": (*_FIRST, "ref_answer_1"),
    "single-v1-multi-turn": _SECOND,
    "single-math-v1-multi-turn": (*_SECOND, "ref_answer_1", "ref_answer_2"),
}
"""Form, by FastChat's name -> the names that its template must hold in braces. `multi-turn` rates the second answer;
`math` has reference answers."""


class _Row(TypedDict):
    name: str
    system_prompt: str
    prompt_template: str


@dataclass(frozen=True)
class Form:
    """One way to ask for a rating."""

    system: str
    template: str

    def fill(self, texts: Mapping[str, str]) -> str:
        """The template with texts for its names; braces in a text are left as they are."""
        return _NAME.sub(lambda name: texts.get(name[1], name[0]), self.template)


def read_forms(file: Path) -> dict[str, Form]:
    """The four forms of a file; further ones are ignored.

    Raises:
        DataError: If a line is malformed, a form is missing, or its template lacks a name.
    """
    found = {}
    for where, row in read_rows(file):
        check_shape(row, _Row, where, DataError)
        found[row["name"]] = Form(row["system_prompt"], row["prompt_template"])
    for name, held in HOLDS.items():
        template = found[name].template if name in found else ""
        if missing := [each for each in held if each not in _NAME.findall(template)]:
            raise DataError(
                f"{file}: expected a form {name!r} whose prompt_template holds {{{'}, {'.join(held)}}}, got none with "
                f"{{{missing[0]}}}. Correct it, or leave environment.judge.template out."
            )
    return {name: found[name] for name in HOLDS}


_SYSTEM = (
    "You are an examiner who grades what language models write, strictly and evenly. Length earns nothing."
)
_GRADE = (
    "Write down briefly what is good and what is bad about {graded}. Does it do what was asked? Is it true, complete "
    "and clear?{compare} Then close with a grade from 1, which is worthless, to 10, which cannot be improved, between "
    "two pairs of square brackets, like this: [[3]]"
)


def _own(held: tuple[str, ...]) -> Form:
    """Our wording of a form that holds these names."""
    second, reference = "answer_2" in held, "ref_answer_1" in held
    graded = "the second answer, in view of the first" if second else "the answer"
    compare = " Compare it with the correct answer, and name each error." if reference else ""
    parts = [_GRADE.format(graded=graded, compare=compare)]
    for number in ("_1", "_2") if second else ("",):
        parts.append(f"=== Question ===\n{{question{number}}}")
        parts += [f"=== Correct answer ===\n{{ref_answer{number or '_1'}}}"] if reference else []
        parts.append(f"=== Answer of the model ===\n{{answer{number}}}")
    return Form(_SYSTEM, "\n\n".join([*parts, "=== End ==="]))


OWN = {name: _own(held) for name, held in HOLDS.items()}
"""Our forms. Ratings by them compare with each other, not with those that were published."""


BEST = 10
"""The highest rating; the lowest is 1."""
_SAMPLING = Sampling(temperature=0.0, max_new_tokens=2048)
_RATING = re.compile(r"\[\[\s*(\d{1,2}(?:\.\d{1,4})?)\s*\]\]")


@dataclass(frozen=True)
@bounded
class JudgeSettings:
    """The section `judge` of the environment."""

    model: str
    """Name of the model at the server."""
    server: ApiSettings = field(default_factory=ApiSettings)
    """The server, with the settings of the engine `api`."""
    template: Annotated[str | None, PATH] = None
    """File of forms in the layout of FastChat's `judge_prompts.jsonl`; None: our own."""
    tries: Annotated[int, Bound(least=1)] = 3
    """Judgments of one answer, at most; if none has a rating, the episode fails."""


class Judge:
    """Rates answers at temperature 0. A judgment without a rating is asked for again, and never made up.

    A server that leaves one judgment unanswered fails its episode. What is wrong with all of them (key, model, rate,
    budget, a server that is down) ends the run with nothing recorded as failed, as with the engine `api`.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        """Read the forms, and the key from the environment; nothing is sent yet.

        Raises:
            PerturnError: If the file of forms is malformed, or the key or the package `openai` is missing.
        """
        file = settings.template
        self.forms = OWN if file is None else read_forms(user_path(file, "environment.judge.template"))
        self._tries = settings.tries
        self._engine = open_engine(settings.model, json.dumps(asdict(settings.server), sort_keys=True))

    def rate(self, conversation: str, form: str, texts: Mapping[str, str]) -> float:
        """The rating of one answer, from 1 to `BEST`.

        Args:
            conversation: Whose answer it is.
            form: Name of the form.
            texts: Texts for the names in it.

        Raises:
            EnvironmentFailure: If there is no rating.
            RunError: If no answer at all can be rated.
        """
        system: Message = {"role": "system", "content": self.forms[form].system}
        asked: Message = {"role": "user", "content": self.forms[form].fill(texts)}
        said = ""
        for attempt in range(self._tries):  # an equal prompt with an equal seed is not sent again
            said = self._ask(Prompt((system,), (), (asked,), seed=attempt, conversation=conversation))
            if (rating := read_rating(said)) is not None:
                return rating
        raise EnvironmentFailure(
            f"the judge gave no rating from 1 to {BEST}, such as [[7]], in {self._tries} judgments, the last of which "
            f"ends with {said[-100:]!r}; if it was cut, set environment.judge.server.request={{max_tokens: 8192}}."
        )

    def _ask(self, prompt: Prompt) -> str:
        """A judgment."""
        try:
            (answer,) = self._engine.generate([prompt], _SAMPLING)
        except (ConfigError, RunError) as error:
            where = "environment.judge has model.name as model, and engine as server"
            raise RunError(f"the judge cannot be asked: {error} ({where}.)") from error
        if isinstance(answer, EngineFailure):
            raise EnvironmentFailure(f"the judge gave no judgment: {answer}")
        return answer.text


@cache
def open_engine(model: str, server: str) -> Engine:
    """The engine that asks a judge, which all worlds of a process share: its pace, its budget, and what was bought.

    Args:
        model: Name of the model at the server.
        server: `ApiSettings` as JSON.

    Raises:
        ConfigError: If the key or the package `openai` is missing.
    """
    require_library("openai", "mt-bench's judge", "api")
    from perturn.engines.api.engine import ApiEngine

    engine = ApiEngine(model, ApiSettings(**json.loads(server)))
    atexit.register(engine.close)
    return engine


def read_rating(judgment: str) -> float | None:
    """The rating in a judgment; None if it has none, two that differ, or one that is not from 1 to `BEST`."""
    found = {float(number) for number in _RATING.findall(judgment)}
    if len(found) != 1:
        return None
    (rating,) = found
    return rating if 1 <= rating <= BEST else None
