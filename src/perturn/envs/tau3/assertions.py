"""Check assertions in plain language with a judge: a model that is reached through a chat-completions API."""

from __future__ import annotations

from collections.abc import Sequence

from perturn.engines.judging.judge_engine import JudgeSettings
from perturn.engines.judging.judge_questions import lines, question
from perturn.errors import EnvironmentFailure
from perturn.types import Message

_SCALE = (0.0, 1.0)
_RUBRIC = """The assistant is an agent of customer service, and each item below says what is expected of the agent.
The grade is 1 if the transcript meets every item, else 0; there is nothing between.
{items}"""


class AssertionJudge:
    """A judge, at temperature 0, that decides whether an episode meets the assertions of its task."""

    def __init__(self, settings: JudgeSettings) -> None:
        """Read the API key from its environment variable. No request is sent yet.

        Raises:
            ConfigError: If the key or the package `openai` is missing.
        """
        self._judge = settings.open(_SCALE, "tau3's judge")

    def holds(self, task: str, said: Sequence[Message], assertions: Sequence[str]) -> bool:
        """Return whether the messages of an episode meet every assertion.

        Raises:
            EnvironmentFailure: If the judge gives no grade.
            RunError: If the judge cannot answer any question, such as with a wrong API key.
        """
        rubric = _RUBRIC.format(items="\n".join(f"- {each}" for each in assertions))
        (found,) = self._judge.rate([question(lines(said), rubric, _SCALE, "episode", task)])
        for problem in found.problems:
            raise EnvironmentFailure(problem)
        return found.ratings[0] == _SCALE[1]
