"""MT-Bench as an environment: a question and a follow-up question, with a judge model that rates both answers.

Zheng et al. 2023, "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", arXiv:2306.05685: single-answer grading.
The environment needs `pip install "perturn[api]"`, the questions, and a judge. `docs/environments.md` describes how to
get them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import TypedDict

from perturn.envs.benchmark import NO_EPISODE, check_known, short_hash
from perturn.envs.json_rows import read_rows
from perturn.envs.mt_bench.examiner import SCALE, Examiner, ExaminerSettings
from perturn.errors import DataError, EnvironmentFailure
from perturn.io.read_input import check_shape, user_path
from perturn.traits import EnvironmentTraits
from perturn.types import EpisodeProtocol, Observation, Sampling, Task

MT_BENCH = EpisodeProtocol(
    name="mt-bench",
    format="plain",
    system="Answer the user.",
    max_turns=4,
    sampling=Sampling(temperature=0.0, max_new_tokens=1024),
)
"""Protocol of MT-Bench. An episode has two turns. The limit is higher, since a question is asked again after an answer
that cannot be stored as Unicode. FastChat samples some categories at temperature 0.7 or 0.1; here decoding is
greedy."""


class MTBench:
    """MT-Bench: open questions with a follow-up question; a judge rates both answers. For evaluation only.

    The reward of a turn is its rating / 20. So the total reward of an episode is its mean rating / 10, from 0.1 to 1.
    MT-Bench's own number is the average total reward times 10. `success` is always False, since no rating counts as
    solved.

    The judge rates the first answer with the first question, and the second answer with the whole conversation. For
    math, reasoning and coding, it also sees a reference answer. If the judge gives no rating, the episode is FAILED.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True,
        protocol="mt-bench",
        distributions=("openai",),
        reads=lambda settings: data_files(settings.get("data")),
    )

    def __init__(self, judge: ExaminerSettings, data: str | None = None) -> None:
        """Read the questions and the judge's prompt templates. No request is sent yet.

        Args:
            judge: Settings of the judge.
            data: Folder of the questions. None: `$MTBENCH_DATA`.
        """
        self._tasks = read_tasks(data)
        self._judge = Examiner(judge)
        asked = sorted((name, each.system, each.template) for name, each in self._judge.templates.items())
        digest = short_hash(repr([[task.data for task in self._tasks], asked]))
        self.name = f"mt-bench-1-{judge.model}-{digest[:8]}"
        self._task: Task | None = None
        self._answers: list[str] = []
        self._ratings: list[float] = []

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all questions. The only split is `test`."""
        check_known("split", split, ("test",), "mt-bench")
        return self._tasks

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Ask the first question; the seed has no effect."""
        self._task, self._answers, self._ratings = task, [], []
        return Observation(task.data["turns"][0])

    def step(self, action: str) -> Observation:
        """Have the judge rate an answer, and return the follow-up question or the end of the episode."""
        if self._task is None:
            raise EnvironmentFailure(NO_EPISODE)
        self._answers.append(action)
        self._ratings.append(self._rate(self._task))
        reward = self._ratings[-1] / (2 * SCALE[1])
        if len(self._answers) == 1:
            return Observation(self._task.data["turns"][1], reward=reward)
        self._task = None
        first, second = self._ratings
        return Observation(
            f"The answers were rated {first:g} and {second:g}.", reward=reward, terminated=True
        )

    def close(self) -> None:
        """End the episode. The judge's connection stays open, since the process shares it."""
        self._task = None

    def _rate(self, task: Task) -> float:
        """Return the judge's rating of the last answer, from 1 to 10."""
        turns, reference = task.data["turns"], task.data["reference"]
        texts = {"question": turns[0], "answer": self._answers[0]}
        for name, values in (("question", turns), ("answer", self._answers), ("ref_answer", reference or ())):
            texts |= {f"{name}_{number}": value for number, value in enumerate(values, start=1)}
        template = f"single-{'math-' if reference else ''}v1{'-multi-turn' if self._answers[1:] else ''}"
        return self._judge.rate(task.id, template, texts)


REFERRED = ("math", "reasoning", "coding")
"""Categories whose questions need a reference answer for the judge."""

_QUESTIONS, _REFERENCES = "question.jsonl", "reference_answer/gpt-4.jsonl"
_REMEDY = (
    "Get the folder fastchat/llm_judge/data/mt_bench of github.com/lm-sys/FastChat, and name it in environment.data "
    "or $MTBENCH_DATA."
)
_Two = Annotated[list[str], Field(min_length=2, max_length=2)]


class _Question(TypedDict):
    question_id: int
    category: str
    turns: _Two


class _Choice(TypedDict):
    turns: _Two


class _Reference(TypedDict):
    question_id: int
    choices: Annotated[list[_Choice], Field(min_length=1)]


def read_tasks(data: str | None) -> list[Task]:
    """Return the questions as tasks, in the order of the file. The kind of a task is its category.

    Args:
        data: Folder of the files; None: `$MTBENCH_DATA`.

    Raises:
        EnvironmentFailure: If no folder is named or a file is missing. The message says where to get the files.
        DataError: If a line is malformed, or a question lacks its reference answer.
    """
    files = data_files(data)
    if not files:
        raise EnvironmentFailure(f"mt-bench needs questions, which do not come with Perturn. {_REMEDY}")
    asked, answered = files
    references = {row["question_id"]: row["choices"][0]["turns"] for _, row in _rows(answered, _Reference)}
    tasks = []
    for where, row in _rows(asked, _Question):
        number, kind = row["question_id"], row["category"]
        if kind in REFERRED and number not in references:
            raise DataError(f"{where}: question {number} has no answer in {_REFERENCES}. {_REMEDY}")
        posed = {"turns": row["turns"], "reference": references.get(number)}
        tasks.append(Task(f"{kind}/{number}", kind, "test", posed))
    return tasks


def data_files(data: str | None) -> list[Path]:
    """Return the paths of the questions and the reference answers, which may not exist; none if no folder is named.

    Args:
        data: Folder of the files; None: `$MTBENCH_DATA`.
    """
    named = data or os.environ.get("MTBENCH_DATA")
    folder = user_path(named, "environment.data") if named else None
    return [folder / _QUESTIONS, folder / _REFERENCES] if folder else []


def _rows(file: Path, shape: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the position and the object of each row of a file, checked against a `TypedDict`."""
    if not file.is_file():
        raise EnvironmentFailure(f"mt-bench needs {file}, which is not there. {_REMEDY}")
    for where, row in read_rows(file):
        yield where, check_shape(row, shape, where, DataError)
