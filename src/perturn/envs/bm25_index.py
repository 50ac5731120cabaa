"""Documents on disk with a BM25 index: built once in the user's cache, memory-mapped from then on.

HotpotQA keeps its paragraphs so, WebShop its products. Words are split as Lucene's English analyzer does, as far as it
matters: lower case, its 33 stop words and the s of possessives left out, Porter stems. The ranking is its BM25 with
k1 = 0.9 and b = 0.4, the defaults of pyserini. Equal scores rank in the order of the documents.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from perturn.data.cache_folders import cache_folder, content_digest
from perturn.errors import DataError, EnvironmentFailure
from perturn.io.atomic_write import replacing

MODULES = ("bm25s", "Stemmer")
"""Modules that the index needs, which an extra brings."""
_LAYOUT = "1"
"""Changes with anything that makes an older index unusable."""


@dataclass(frozen=True)
class Document:
    """A text to be found, with data to give back."""

    name: str
    """Title to ask for it by, in any case of letters; several documents may share it."""
    text: str
    """Text that is searched."""
    data: Mapping[str, Any]
    """Data that is given back."""


def open_index(key: str, documents: Callable[[], Iterable[Document]]) -> DocumentIndex:
    """Return the index of a key: already open in this process, from the cache, or made again.

    Args:
        key: What the documents depend on; see `content_key`.
        documents: Gives them, if they must be read.

    Raises:
        DataError: If there is no document; and whatever `documents` raises.
        EnvironmentFailure: If the cache holds something else.
    """
    with _lock:
        if key not in _open:
            folder = cache_folder() / "indexes" / key
            if not folder.is_dir():
                _build(folder, documents())
            try:
                _open[key] = DocumentIndex(folder)
            except (OSError, ValueError, KeyError, EOFError) as error:
                raise EnvironmentFailure(
                    f"{folder}: the index cannot be read ({type(error).__name__}: {error}). "
                    "Delete this folder; it is built again."
                ) from error
        return _open[key]


def content_key(files: Iterable[str | os.PathLike[str]], *settings: object) -> str:
    """Name of an index: a hash of the files' contents and of the settings it is built with.

    Raises:
        DataError: If a file is missing.
    """
    parts = [_LAYOUT, *(_digest(Path(file)) for file in files), *map(repr, settings)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


class DocumentIndex:
    """Documents that can be found by number, by name, and by words. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        import bm25s

        with (folder / "documents.jsonl").open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        load = partial(np.load, mmap_mode="r", allow_pickle=False)
        self._starts = load(folder / "starts.npy")
        self._hashes = load(folder / "hashes.npy")
        self._holders = load(folder / "holders.npy")
        if self._starts[-1] != len(self._text):
            raise ValueError("documents.jsonl was cut short or changed")
        self._ranking = bm25s.BM25.load(folder, mmap=True, show_progress=False)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return the data of a document."""
        data: dict[str, Any] = self._line(number)["data"]
        return data

    def named(self, name: str) -> list[int]:
        """Return the documents of this name, in order."""
        key = _name_hash(name)
        low, high = (int(np.searchsorted(self._hashes, key, side)) for side in ("left", "right"))
        found = [int(number) for number in self._holders[low:high]]
        return [number for number in found if _folded(self._line(number)["name"]) == _folded(name)]

    def search(self, query: str, limit: int) -> list[int]:
        """Return the documents that match best, best first; those that share no word with the query never do."""
        words = _words([query], return_ids=False)[0]
        if not words:
            return []
        scores = self._ranking.get_scores(words)
        cut = np.partition(scores, -limit)[-limit] if limit < len(scores) else 0.0
        found = np.flatnonzero((scores >= cut) & (scores > 0))
        best = np.lexsort((found, -scores[found]))[:limit]
        return [int(number) for number in found[best]]

    def _line(self, number: int) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self._text[self._starts[number] : self._starts[number + 1]])
        return line


_lock = threading.Lock()
_open: dict[str, DocumentIndex] = {}


def _words(texts: Iterable[str], *, return_ids: bool) -> Any:
    """Return the stems of texts, as bm25s takes them."""
    import bm25s
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN

    return bm25s.tokenize(
        texts,  # any iterable will do: the texts of a large corpus do not fit in memory
        token_pattern=r"(?u)\b\w+\b",
        stopwords=[*STOPWORDS_EN, "s"],  # of a possessive; its stem is empty
        stemmer=Stemmer.Stemmer("porter"),
        return_ids=return_ids,
        show_progress=False,
    )


def _build(folder: Path, documents: Iterable[Document]) -> None:
    """Write an index whole; whoever comes second finds it."""
    with replacing(folder, once=True) as fresh:
        fresh.mkdir()
        _write(fresh, documents)


def _write(folder: Path, documents: Iterable[Document]) -> None:
    import bm25s

    starts, hashes = [0], list[int]()
    with (folder / "documents.jsonl").open("wb") as file:
        words = _words(_written(documents, file, starts, hashes), return_ids=True)
    if not hashes:
        raise DataError("there is no document to search: give a file that holds some.")
    order = np.argsort(np.array(hashes, np.uint64), kind="stable")
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, np.uint64)[order])
    np.save(folder / "holders.npy", order)
    ranking = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    ranking.index(words, show_progress=False)
    ranking.save(folder, show_progress=False)


def _written(
    documents: Iterable[Document], file: BinaryIO, starts: list[int], hashes: list[int]
) -> Iterator[str]:
    """Yield the texts to search, while the documents are written."""
    for document in documents:
        record = {"name": document.name, "data": dict(document.data)}
        file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        starts.append(file.tell())
        hashes.append(_name_hash(document.name))
        yield document.text


def _folded(name: str) -> str:
    return " ".join(name.casefold().split())


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(_folded(name).encode(), digest_size=8).digest())


def _digest(file: Path) -> str:
    """Return the hash of a file's content, which is read again only if the file has changed."""
    if not os.path.isfile(file):
        raise DataError(
            f"{file}: expected a file, got {'a folder' if file.is_dir() else 'none'}. Correct the path."
        )
    return content_digest(file)
