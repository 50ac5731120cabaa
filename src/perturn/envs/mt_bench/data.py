"""MT-Bench's files, in FastChat's layout: questions and reference answers, each mistake with its file and line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from perturn.envs.json_rows import read_rows
from perturn.errors import DataError, EnvironmentFailure
from perturn.io.read_input import check_shape, user_path
from perturn.types import Task

REFERRED = ("math", "reasoning", "coding")
"""Categories whose questions need a reference answer, with which a judge compares."""

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
    """The questions as tasks, in the order of the file; the kind is the category.

    Args:
        data: Folder of the files; None: `$MTBENCH_DATA`.

    Raises:
        EnvironmentFailure: If there is no such folder, with where to get it.
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
    """Return the files of questions and reference answers, which need not be there; none if no folder is named.

    Args:
        data: Folder of the files; None: `$MTBENCH_DATA`.
    """
    named = data or os.environ.get("MTBENCH_DATA")
    folder = user_path(named, "environment.data") if named else None
    return [folder / _QUESTIONS, folder / _REFERENCES] if folder else []


def _rows(file: Path, shape: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, of one shape, each with its file and line."""
    if not file.is_file():
        raise EnvironmentFailure(f"mt-bench needs {file}, which is not there. {_REMEDY}")
    for where, row in read_rows(file):
        yield where, check_shape(row, shape, where, DataError)
