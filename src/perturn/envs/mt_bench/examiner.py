"""The judge: a model at a server of the chat-completions protocol, which rates one answer from 1 to 10."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import PATH, bounded
from perturn.engines.judging.judge import Question
from perturn.engines.judging.judge_engine import JudgeSettings
from perturn.envs.mt_bench.judge_prompts import OWN, read_forms
from perturn.errors import EnvironmentFailure
from perturn.io.read_input import user_path

SCALE = (1, 10)
"""Lowest and highest rating."""


@dataclass(frozen=True)
@bounded
class ExaminerSettings(JudgeSettings):
    """The section `judge` of the environment."""

    template: Annotated[str | None, PATH] = None
    """File of forms in the layout of FastChat's `judge_prompts.jsonl`; None: our own."""


class Examiner:
    """Rates answers at temperature 0 by the forms of MT-Bench."""

    def __init__(self, settings: ExaminerSettings) -> None:
        """Read the forms, and the key from the environment; nothing is sent yet.

        Raises:
            PerturnError: If the file of forms is malformed, or the key or the package `openai` is missing.
        """
        file = settings.template
        self.forms = OWN if file is None else read_forms(user_path(file, "environment.judge.template"))
        self.model = settings.model
        self.judge = settings.open(SCALE, "mt-bench's judge")

    def rate(self, conversation: str, form: str, texts: Mapping[str, str]) -> float:
        """Return the rating of one answer, on `SCALE`.

        Args:
            conversation: Whose answer it is.
            form: Name of the form.
            texts: Texts for the names in it.

        Raises:
            EnvironmentFailure: If there is no rating.
            RunError: If no answer at all can be rated.
        """
        chosen = self.forms[form]
        (found,) = self.judge.rate([Question(chosen.system, chosen.fill(texts), conversation)])
        for problem in found.problems:
            raise EnvironmentFailure(
                f"{problem}; if it was cut, set environment.judge.server.request={{max_tokens: 8192}}."
            )
        return found.ratings[0]
