"""Assertions in plain language, which a judge checks: a model at a server of the chat-completions protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from perturn.bounds import Bound, bounded
from perturn.engines.api.settings import ApiSettings
from perturn.engines.judging.judge import Judge
from perturn.engines.judging.judge_engine import open_engine
from perturn.engines.judging.transcripts import lines, question
from perturn.errors import EnvironmentFailure
from perturn.types import Message, Sampling

_SCALE = (0.0, 1.0)
_SAMPLING = Sampling(temperature=0.0, max_new_tokens=2048)
_SETTINGS = "environment.judge has model.name as model, and engine as server"
_RUBRIC = """The assistant is an agent of customer service, and each item below says what is expected of the agent.
The grade is 1 if the transcript meets every item, else 0; there is nothing between.
{items}"""


@dataclass(frozen=True)
@bounded
class JudgeSettings:
    """The section `judge` of the environment."""

    model: str
    """Name of the model at the server."""
    server: ApiSettings = field(default_factory=ApiSettings)
    """The server, with the settings of the engine `api`."""
    tries: Annotated[int, Bound(least=1)] = 3
    """Judgments of one episode, at most; if none has a grade, the episode fails."""


class AssertionJudge:
    """Says whether an episode keeps its assertions, at temperature 0."""

    def __init__(self, settings: JudgeSettings) -> None:
        """Read the key from the environment; nothing is sent yet.

        Raises:
            ConfigError: If the key or the package `openai` is missing.
        """
        server = json.dumps(asdict(settings.server), sort_keys=True)
        engine = open_engine(settings.model, server, "tau3's judge")
        self._judge = Judge(engine, _SAMPLING, _SCALE, _SETTINGS, tries=settings.tries)

    def holds(self, task: str, said: Sequence[Message], assertions: Sequence[str]) -> bool:
        """Return whether the messages of an episode meet every assertion.

        Raises:
            EnvironmentFailure: If the judge gives no grade.
            RunError: If no question at all can be answered.
        """
        rubric = _RUBRIC.format(items="\n".join(f"- {each}" for each in assertions))
        (found,) = self._judge.rate([question(lines(said), rubric, _SCALE, "episode", task)])
        for problem in found.problems:
            raise EnvironmentFailure(problem)
        return found.ratings[0] == _SCALE[1]
