"""Corpora from HotpotQA's official files."""

import bz2
import io
import json
import tarfile
from pathlib import Path

import pytest

from perturn.envs.hotpotqa.corpus import main
from perturn.envs.hotpotqa.data import read_documents, split_sentences

HOLM = ["Holm", ["Holm is a lake.", " It has no islands."]]
SARN = ["Sarn", ["Sarn is an island."]]
OFFICIAL = [{"_id": "1", "question": "a?", "context": [HOLM, SARN]}, {"_id": "2", "context": [SARN]}]
ON_THE_HUB = [{"context": {"title": ["Holm", "Sarn"], "sentences": [HOLM[1], SARN[1]]}}]
PAGES = [
    {"id": "12", "title": "Holm", "text": ['Holm is a <a href="lake">lake</a>.', " It has no islands."]},
    {"id": "13", "title": "Sarn &amp; Holm", "text": [["Sarn &amp; Holm", " is an island."], [""]]},
    {"id": "14", "title": "Empty", "text": []},
]


def packed(rows):
    """Rows as a bz2 file of Wikipedia holds them."""
    return bz2.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def pages(file):
    """Titles and sentences of a corpus that was written."""
    return [(document.data["title"], document.data["sentences"]) for document in read_documents(file)]


@pytest.mark.parametrize("rows", [OFFICIAL, ON_THE_HUB])
def test_distractor_files(tmp_path, rows, capsys):
    """Each paragraph once; both forms in which the file is spread."""
    (tmp_path / "dev.json").write_text(json.dumps(rows))
    target = tmp_path / "corpus.jsonl"

    assert main(["distractor", str(tmp_path / "dev.json"), str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: 2 paragraphs\n"
    assert pages(target) == [
        ("Holm", ["Holm is a lake.", "It has no islands."]),
        ("Sarn", ["Sarn is an island."]),
    ]


@pytest.mark.parametrize("form", ["archive", "folder", "file"])
def test_wikipedia_abstracts(tmp_path, form):
    """As archive, folder or one file; links and HTML's escapes go, pages without text too."""
    folder = tmp_path / "abstracts"
    (folder / "AA").mkdir(parents=True)
    (folder / "AA" / "wiki_00.bz2").write_bytes(packed(PAGES))
    archive = tmp_path / "abstracts.tar.bz2"
    with tarfile.open(archive, "w:bz2") as opened:
        opened.add(folder, "abstracts")
    source = {"archive": archive, "folder": folder, "file": folder / "AA" / "wiki_00.bz2"}[form]
    target = tmp_path / "corpus.jsonl"

    assert main(["abstracts", str(source), str(target)]) == 0
    assert pages(target) == [
        ("Holm", ["Holm is a lake.", "It has no islands."]),
        ("Sarn & Holm", ["Sarn & Holm", "is an island."]),
    ]


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("distractor", b'[{"question": "a?"}]', "source:1: expected paragraphs in 'context', got None"),
        (
            "distractor",
            b'[{"context": [["Holm"]]}]',
            "source:1: context: expected pairs of title and sentences",
        ),
        ("distractor", b'[{"context": [["", ["x"]]]}]', "source:1: context: expected a text in 'title'"),
        ("abstracts", packed([{"text": ["x"]}]), "source:1: expected a text in 'title', got the keys text"),
        ("abstracts", bz2.compress(b"no json"), "source:1: expected JSON"),
        ("abstracts", b"no bz2", "source: cannot be read"),
        ("abstracts", packed(PAGES)[:-8], "source: cannot be read"),
    ],
)
def test_a_bad_file_is_named_and_nothing_is_written(tmp_path, capsys, form, content, message):
    """The command ends with 2, and an older corpus stays."""
    (tmp_path / "source").write_bytes(content)
    target = tmp_path / "corpus.jsonl"
    target.write_text("old")

    assert main([form, str(tmp_path / "source"), str(target)]) == 2
    assert message in capsys.readouterr().err
    assert target.read_text() == "old"
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["corpus.jsonl", "source"]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("One\n\nTwo.", ["One", "Two."]),
        ("At 3.50 euros. Cheap.", ["At 3.50 euros.", "Cheap."]),
        (" ", []),
    ],
)
def test_sentences(text, sentences):
    """End at a mark with white space behind it, or at a line's end."""
    assert split_sentences(text) == sentences


def test_archives_in_tar_without_compression_are_read(tmp_path):
    """What is not bz2 in an archive is passed over."""
    archive = tmp_path / "abstracts.tar"
    with tarfile.open(archive, "w") as opened:
        for name, content in (("README", b"x"), ("AA/wiki_00.bz2", packed(PAGES[:1]))):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            opened.addfile(entry, io.BytesIO(content))

    assert main(["abstracts", str(archive), str(tmp_path / "corpus.jsonl")]) == 0
    assert len(pages(tmp_path / "corpus.jsonl")) == 1
