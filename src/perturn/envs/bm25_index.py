"""Documents on disk with a BM25 index. The index is built once in the user's cache folder and then memory-mapped.

HotpotQA searches its paragraphs with it, and WebShop its products. The tokenization approximates Lucene's English
analyzer: lower case, Porter stems, without Lucene's 33 stop words and the possessive s. The ranking is Lucene's BM25
with k1 = 0.9 and b = 0.4, the defaults of pyserini. Documents with equal scores keep their order.
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
"""Modules that the index needs; optional dependencies of Perturn install them."""
_LAYOUT = "1"
"""Version of the index format; part of the cache key, so that an older index is built again."""


@dataclass(frozen=True)
class Document:
    """A searchable text, with the data that a search returns."""

    name: str
    """Title that `DocumentIndex.named` looks up, ignoring case; several documents may share it."""
    text: str
    """Text that is searched."""
    data: Mapping[str, Any]
    """Data that `DocumentIndex` returns for the document."""


def open_index(key: str, documents: Callable[[], Iterable[Document]]) -> DocumentIndex:
    """Return the index of a key. If neither this process nor the cache has it, the index is built.

    Args:
        key: Key from `content_key`, which depends on the source files and settings.
        documents: Function that reads the documents; called only to build the index.

    Raises:
        DataError: If there is no document. Exceptions of `documents` are passed on.
        EnvironmentFailure: If the cached index cannot be read.
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
    """Return the key of an index: a hash of the source files' contents and of the settings.

    Raises:
        DataError: If a file is missing.
    """
    parts = [_LAYOUT, *(_digest(Path(file)) for file in files), *map(repr, settings)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


class DocumentIndex:
    """Documents that can be looked up by number or by name, or searched by words. Threads may share one object."""

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
        """Return the numbers of the documents with this name, in ascending order."""
        key = _name_hash(name)
        low, high = (int(np.searchsorted(self._hashes, key, side)) for side in ("left", "right"))
        found = [int(number) for number in self._holders[low:high]]
        return [number for number in found if _folded(self._line(number)["name"]) == _folded(name)]

    def search(self, query: str, limit: int) -> list[int]:
        """Return the numbers of at most `limit` documents that share a word with the query, best match first."""
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
    """Return the word stems of texts in the form that bm25s expects."""
    import bm25s
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN

    return bm25s.tokenize(
        texts,  # an iterator is allowed, since the texts of a large corpus do not fit in memory
        token_pattern=r"(?u)\b\w+\b",
        stopwords=[*STOPWORDS_EN, "s"],  # the possessive s, whose stem is empty
        stemmer=Stemmer.Stemmer("porter"),
        return_ids=return_ids,
        show_progress=False,
    )


def _build(folder: Path, documents: Iterable[Document]) -> None:
    """Write an index, then move it into place; if another process has built it meanwhile, use that index."""
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
    """Write the documents to the file, and yield the text of each for the index."""
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
    """Return the hash of a file's content. The file is read again only if it has changed."""
    if not os.path.isfile(file):
        raise DataError(
            f"{file}: expected a file, got {'a folder' if file.is_dir() else 'none'}. Correct the path."
        )
    return content_digest(file)
