"""The judge of MT-Bench: a model that rates answers from 1 to 10, reached through a chat-completions API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import PATH, bounded
from perturn.engines.judging.judge import Question
from perturn.engines.judging.judge_engine import JudgeSettings
from perturn.envs.mt_bench.judge_prompts import OWN, read_templates
from perturn.errors import EnvironmentFailure
from perturn.io.read_input import user_path

SCALE = (1, 10)
"""Lowest and highest rating."""


@dataclass(frozen=True)
@bounded
class ExaminerSettings(JudgeSettings):
    """Settings of the judge: the section `judge` of the environment."""

    template: Annotated[str | None, PATH] = None
    """File of prompt templates in the format of FastChat's `judge_prompts.jsonl`; None: Perturn's own templates."""


class Examiner:
    """A judge that rates answers with MT-Bench's prompt templates at temperature 0."""

    def __init__(self, settings: ExaminerSettings) -> None:
        """Read the prompt templates, and the API key from its environment variable. No request is sent yet.

        Raises:
            PerturnError: If the file of templates is malformed, or the key or the package `openai` is missing.
        """
        file = settings.template
        self.templates = (
            OWN if file is None else read_templates(user_path(file, "environment.judge.template"))
        )
        self.model = settings.model
        self.judge = settings.open(SCALE, "mt-bench's judge")

    def rate(self, conversation: str, template: str, texts: Mapping[str, str]) -> float:
        """Return the rating of one answer, on `SCALE`.

        Args:
            conversation: Id of the task.
            template: Name of the prompt template.
            texts: Placeholder in the template -> its text.

        Raises:
            EnvironmentFailure: If the judge gives no valid rating of this answer.
            RunError: If the judge cannot rate any answer, such as with a wrong API key.
        """
        chosen = self.templates[template]
        (found,) = self.judge.rate([Question(chosen.system, chosen.fill(texts), conversation)])
        for problem in found.problems:
            raise EnvironmentFailure(
                f"{problem}; if it was cut, set environment.judge.server.request={{max_tokens: 8192}}."
            )
        return found.ratings[0]
