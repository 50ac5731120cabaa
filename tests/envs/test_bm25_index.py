"""The index on disk: built once, found again, ranked alike everywhere."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from perturn.envs import bm25_index as _index
from perturn.envs.bm25_index import Document, DocumentIndex, content_key, open_index
from perturn.errors import DataError, EnvironmentFailure

TEXTS = ["tea mug", "a mug for the running man", "runs and mugs", "nothing of the kind", "tea mug"]


def documents():
    """Five documents, of which two have the same text and two the same name."""
    return [
        Document(name, text, {"n": n})
        for n, (name, text) in enumerate(zip(["A", "B", "b ", "C", "D"], TEXTS, strict=True))
    ]


def refused():
    """Documents that nobody should ask for."""
    raise AssertionError("built a second time")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and a process that has nothing open."""
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_index, "_open", {})
    return tmp_path


def test_it_is_built_once_and_mapped_from_then_on(fresh, monkeypatch):
    """The next process finds it in the cache; arrays and texts stay on the disk."""
    first = open_index("key", documents)
    monkeypatch.setattr(_index, "_open", {})
    second = open_index("key", refused)

    assert open_index("key", refused) is second
    assert (
        [second[n] for n in range(len(second))]
        == [first[n] for n in range(5)]
        == [{"n": n} for n in range(5)]
    )
    assert isinstance(second._text, mmap.mmap)
    for array in (second._starts, second._ranking.scores["data"], second._ranking.scores["indices"]):
        assert isinstance(array, np.memmap)
    assert [path.name for path in (fresh / "cache" / "indexes").iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("query", "limit", "found"),
    [
        ("mugs", 5, [0, 2, 4, 1]),  # the shorter the text the better; equal ones in order
        ("mugs", 1, [0]),
        ("tea", 5, [0, 4]),
        ("RUNNING", 5, [2, 1]),  # stems
        ("the", 5, []),  # a stop word
        ("s", 5, []),  # of a possessive: its stem is empty
        ("giraffe", 5, []),
        ("", 5, []),
        ("giraffe kind", 5, [3]),
    ],
)
def test_ranking(fresh, query, limit, found):
    """Best first, ties in the order of the documents, and nothing without a word in common."""
    assert open_index("key", documents).search(query, limit) == found


def test_names_are_found_in_any_case(fresh):
    """And all that share one, in order."""
    index = open_index("key", documents)

    assert [index.named(name) for name in ("a", "B", " c", "E")] == [[0], [1, 2], [3], []]


def test_ranking_is_that_of_bm25(fresh):
    """Worked by hand: idf = ln(1 + (N - n + .5) / (n + .5)), tf / (tf + k1 (1 - b + b length / average)).

    Without stop words the texts have 2, 3, 2, 2 and 2 words, so the average is 2.2. "kind" is in 1 of 5, once.
    """
    index = open_index("key", documents)

    score = index._ranking.get_scores(["kind"])[3]

    assert score == pytest.approx(np.log(1 + 4.5 / 1.5) / (1 + 0.9 * (0.6 + 0.4 * 2 / 2.2)), rel=1e-5)


def test_the_key_follows_contents_and_settings(fresh):
    """Not names or times; a file that changes is read again."""
    one, other = fresh / "one", fresh / "other"
    one.write_text("x")
    other.write_text("x")
    before = content_key([one], "setting")
    other_key = content_key([other], "setting")
    one.write_text("changed")

    assert before == other_key
    assert len({before, content_key([one], "setting"), content_key([other], "another")}) == 3


@pytest.mark.parametrize("missing", ["nowhere", "."])
def test_a_missing_file_is_named(fresh, missing):
    """A folder is none."""
    with pytest.raises(DataError, match="expected a file, got"):
        content_key([fresh / missing])


def test_an_empty_or_failed_build_leaves_nothing(fresh):
    """Not a folder that would be taken for an index."""

    def failing():
        yield documents()[0]
        raise DataError("corpus.jsonl:2: no title")

    with pytest.raises(DataError, match="no document"):
        open_index("empty", list)
    with pytest.raises(DataError, match="jsonl:2"):
        open_index("failed", failing)

    assert list((fresh / "cache" / "indexes").iterdir()) == []


@pytest.mark.parametrize("file", ["documents.jsonl", "params.index.json", "starts.npy", "data.csc.index.npy"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_index_is_named_with_its_remedy(fresh, monkeypatch, file):
    """The message says which folder to delete."""
    open_index("key", documents)
    monkeypatch.setattr(_index, "_open", {})
    damaged = fresh / "cache" / "indexes" / "key" / file
    damaged.write_bytes(damaged.read_bytes()[:10])

    with pytest.raises(
        EnvironmentFailure, match=r"indexes/key: the index cannot be read .* Delete this folder"
    ):
        open_index("key", refused)


def test_two_builders_end_with_one_index(fresh):
    """The slower one finds the other's and keeps it."""
    folder = fresh / "cache" / "indexes" / "key"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: _index._build(folder, documents()), range(2)))

    assert len(DocumentIndex(folder)) == 5
    assert [path.name for path in folder.parent.iterdir()] == ["key"]
