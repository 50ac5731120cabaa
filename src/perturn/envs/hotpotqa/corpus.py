"""Make a corpus for HotpotQA from its official files, as JSON lines with `title` and `sentences`.

    python -m perturn.envs.hotpotqa.corpus distractor hotpot_dev_distractor_v1.json corpus.jsonl
    python -m perturn.envs.hotpotqa.corpus abstracts enwiki-20171001-pages-meta-current-withlinks-abstracts.tar.bz2 \
        corpus.jsonl

`distractor` collects the ten paragraphs of each question, without duplicates, from one or more files.
`abstracts` reads the first paragraphs of Wikipedia pages that HotpotQA publishes. The source is the archive, the
unpacked folder, or a `wiki_00.bz2` file of it.
"""

from __future__ import annotations

import argparse
import bz2
import html
import json
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from perturn.envs.hotpotqa.data import context_paragraphs
from perturn.envs.json_rows import read_rows, text_of, whole
from perturn.errors import DataError, PerturnError
from perturn.io.atomic_write import replacing
from perturn.io.read_input import lines_of, parse_object

Paragraph = tuple[str, list[str]]
"""Title and sentences of a paragraph."""

_REMEDY = "Download it again."
_LINK = re.compile(r"</?a\b[^<>]*>")


def distractor_paragraphs(files: Iterable[Path]) -> Iterator[Paragraph]:
    """Yield the paragraphs in files of the distractor setting, without duplicates, in the order of the files."""
    seen: set[tuple[str, ...]] = set()
    for file in files:
        for where, row in read_rows(file):
            for title, sentences in context_paragraphs(row, where):
                if (title, *sentences) not in seen:
                    seen.add((title, *sentences))
                    yield title, sentences


def abstract_paragraphs(files: Iterable[Path]) -> Iterator[Paragraph]:
    """Yield the first paragraphs of Wikipedia pages, without links; pages without text are skipped.

    A line is `{"title": ..., "text": [sentence, ...]}`. A text of several paragraphs is a list of lists of sentences.
    """
    for where, line in _lines(files):
        row = whole(parse_object(line, where, DataError, _REMEDY), line.decode(), where)
        sentences = [html.unescape(_LINK.sub("", part)).strip() for part in _flat(row.get("text", []))]
        sentences = [part for part in sentences if part]
        if sentences:
            yield html.unescape(text_of(row, "title", where)), sentences


def write_corpus(paragraphs: Iterable[Paragraph], target: Path) -> int:
    """Write a corpus atomically and return its number of paragraphs."""
    count = 0
    with replacing(target) as fresh, fresh.open("w", encoding="utf-8") as file:
        for title, sentences in paragraphs:
            file.write(json.dumps({"title": title, "sentences": sentences}, ensure_ascii=False) + "\n")
            count += 1
    return count


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m perturn.envs.hotpotqa.corpus", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("form", choices=("distractor", "abstracts"))
    parser.add_argument("source", type=Path, nargs="+")
    parser.add_argument("target", type=Path)
    given = parser.parse_args(arguments)
    read = distractor_paragraphs if given.form == "distractor" else abstract_paragraphs
    try:
        count = write_corpus(read(given.source), given.target)
    except (PerturnError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.target}: {count} paragraphs")
    return 0


def _lines(files: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the position and content of each line of bz2 files; archives and folders are searched for bz2 files."""
    for file in files:
        try:
            if file.is_dir():
                yield from _lines(sorted(file.rglob("*.bz2")))
            elif ".tar" in file.suffixes:
                with tarfile.open(file, "r|*") as archive:
                    for member in archive:
                        content = archive.extractfile(member) if member.name.endswith(".bz2") else None
                        if content is not None:
                            yield from _unpacked(content, f"{file}/{member.name}")
            else:
                with file.open("rb") as content:
                    yield from _unpacked(content, str(file))
        except (OSError, EOFError, ValueError, tarfile.TarError) as error:
            raise DataError(f"{file}: cannot be read: {error}. {_REMEDY}") from error


def _unpacked(packed: IO[bytes], name: str) -> Iterator[tuple[str, bytes]]:
    for number, line in lines_of(cast(IO[bytes], bz2.BZ2File(packed)), name, DataError, _REMEDY):
        yield f"{name}:{number}", line


def _flat(text: Any) -> Iterator[str]:
    """Yield the sentences of a text, which is a sentence or a nested list of sentences."""
    if isinstance(text, str):
        yield text
    elif isinstance(text, list):
        for part in text:
            yield from _flat(part)


if __name__ == "__main__":
    sys.exit(main())
