"""Read HotpotQA's questions and a corpus of paragraphs. Errors name the file and line.

A corpus is JSON lines, `{"title": ..., "text": ...}` or `{"title": ..., "sentences": [...]}`; other keys are ignored.
Lines with the same title are paragraphs of one page, in the order of the file. `perturn.envs.hotpotqa.corpus` makes a
corpus from HotpotQA's own files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perturn.envs.benchmark import short_hash
from perturn.envs.bm25_index import Document
from perturn.envs.json_rows import read_rows, refuse, text_of
from perturn.errors import DataError
from perturn.types import Task

_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def read_documents(corpus: Path) -> Iterator[Document]:
    """Yield the paragraphs of a corpus as documents whose searchable text is title and sentences.

    Raises:
        DataError: If the file is missing, or a line is not a paragraph with a title and a text.
    """
    for where, row in read_rows(corpus):
        title, sentences = read_paragraph(row, where)
        yield Document(title, f"{title} {' '.join(sentences)}", {"title": title, "sentences": sentences})


def read_paragraph(row: Mapping[str, Any], where: str) -> tuple[str, list[str]]:
    """Return the title and the sentences of a paragraph.

    Raises:
        DataError: If the row lacks a title, or has neither sentences nor a text.
    """
    title = text_of(row, "title", where)
    sentences = row.get("sentences")
    if sentences is None:
        sentences = split_sentences(text_of(row, "text", where))
    if not isinstance(sentences, list) or not all(isinstance(part, str) for part in sentences):
        refuse(f"{where}: sentences", "a list of texts", sentences)
    return title, [part.strip() for part in sentences if part.strip()]


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, which end at a full stop, question mark, exclamation mark or line end."""
    return [part.strip() for part in _END_OF_SENTENCE.split(text) if part.strip()]


def read_tasks(file: Path, split: str) -> list[Task]:
    """Return the questions of a file as tasks, in the order of the file.

    The file is HotpotQA's own, or a JSON array or JSON lines of objects with `question` and `answer`. The optional key
    `type` is the kind of the task. The task's id is a hash of the question, so that recorded episodes find their task.

    Raises:
        DataError: If the file is missing, or an entry lacks its question or answer.
    """
    tasks = []
    seen: Counter[str] = Counter()
    for where, row in read_rows(file):
        question, answer = (text_of(row, key, where) for key in ("question", "answer"))
        name = question_id(question)
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}-{seen[name]}"
        data = {"question": question, "answer": answer}
        tasks.append(Task(unique, str(row.get("type") or "question"), split, data))
    if not tasks:
        raise DataError(f"{file}: expected questions, got none. Give HotpotQA's file of split {split!r}.")
    return tasks


def question_id(question: str) -> str:
    """Return the task id of a question: a hash of its words, ignoring case and spacing."""
    return short_hash(" ".join(question.casefold().split()))


def context_paragraphs(row: Mapping[str, Any], where: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the paragraphs of a question in the distractor setting.

    HotpotQA's own file has a list of pairs (title, sentences). The Hub's data set has a list of titles and a list of
    sentences.

    Raises:
        DataError: If the question has no paragraphs.
    """
    context = row.get("context")
    if isinstance(context, Mapping):
        columns = [each for key in ("title", "sentences") if isinstance(each := context.get(key), list)]
        context = list(zip(*columns, strict=False)) if len(columns) == 2 else None
    if not isinstance(context, list) or not context:
        raise DataError(
            f"{where}: expected paragraphs in 'context', got {context!r:.60}. "
            "Take a file of the distractor setting, such as hotpot_dev_distractor_v1.json."
        )
    for pair in context:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            refuse(f"{where}: context", "pairs of title and sentences", pair)
        yield read_paragraph({"title": pair[0], "sentences": pair[1]}, f"{where}: context")
