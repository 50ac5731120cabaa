"""The reference pages of entries: each has all headings, a source and short first sentences."""

import dataclasses
import re
from typing import Annotated, Literal

import entries
import pytest
from entries import documentation, interval, pages
from entry_kinds import KINDS

from perturn.bounds import Bound
from perturn.table_index import table
from support.docs import ROOT

ENTRIES = [(kind, name) for kind in KINDS for name in sorted(table(kind))]
HEADINGS = ["Formula", "Source", "Departures", "Needs and cost", "Settings", "Example"]


def sections(page):
    """The text below each heading of a page; what stands before the first one has the key None."""
    first, *rest = re.split(
        r"^## (.*)$", re.sub(r"^# .*$", "", page, count=1, flags=re.MULTILINE), flags=re.MULTILINE
    )
    return {None: first.strip()} | dict(zip(rest[::2], map(str.strip, rest[1::2]), strict=True))


def sentences(text):
    """The sentences of a text; a point within a name or a number ends none."""
    return [each for each in re.split(r"[.!?](?:\s|$)", text) if each.strip()]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_an_entry_has_a_page_with_all_headings(kind, name):
    """In one order, none of them empty."""
    found = sections(pages()[f"methods/{kind}/{name}.md"])
    wanted = [None, *HEADINGS, *(["Bias"] if kind == "credits" else [])]

    assert [each for each in found if each not in ("Notes", "Results")] == wanted
    assert all(found.values())


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_a_page_says_first_what_the_entry_does(kind, name):
    """In two sentences at most."""
    says = documentation(table(kind)[name])["says"]

    assert says.endswith(".")
    assert len(sentences(says)) <= 2


@pytest.mark.parametrize(("kind", "name"), [each for each in ENTRIES if each[0] != "quantities"])
def test_an_entry_says_where_it_is_from_and_where_it_departs(kind, name):
    """In its docstring: `Source:` and `Differs:`, or "nothing." A quantity is from the papers of its readers."""
    parts = documentation(table(kind)[name])

    assert parts["source"]
    assert parts["differs"]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_an_example_has_eight_lines_at_most(kind, name):
    language, shown = KINDS[kind].example(name, table(kind)[name])

    assert language in ("python", "yaml")
    assert len(shown.splitlines()) <= 8


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (Bound(least=0, most=1), "in [0, 1]"),
        (Bound(above=0, most=1), "in (0, 1]"),
        (Bound(least=0, below=1), "in [0, 1)"),
        (Bound(above=0), "above 0"),
        (Bound(least=2), "at least 2"),
        (Bound(most=40), "at most 40"),
        (Bound(below=1), "below 1"),
        (Bound(least=1, most=10**9), "at least 1"),
    ],
)
def test_a_bound_is_printed_in_words(bound, text):
    assert interval(bound) == text


@pytest.mark.parametrize("page", pages())
def test_no_page_shows_how_the_code_writes_a_type(page):
    prose = re.sub(r"`[^`]*`|```.*?```", "", pages()[page], flags=re.DOTALL)

    assert not re.search(r"Bound\(|<class|frozenset\(|\bNone\b(?!\.| is needed)", prose)


@dataclasses.dataclass(frozen=True)
class Toy:
    """Weigh a turn. It is a toy: see v1.5.

    It is

        A = 1

    where A is the weight.

    Source: ours, and arXiv:2402.03300.
    Differs: nothing.
    """

    size: Annotated[int | None, Bound(least=1)] = None
    """Turns."""
    by: Literal["reward", "name"] = "reward"


def test_a_docstring_is_taken_apart():
    """What it does, the formula with what explains it, its source with links, its departures."""
    assert documentation(Toy) == {
        "says": "Weigh a turn. It is a toy: see v1.5.",
        "formula": "It is\n\n```text\nA = 1\n```\n\nwhere A is the weight.",
        "source": "Ours, and [arXiv:2402.03300](https://arxiv.org/abs/2402.03300).",
        "differs": "None.",
    }
    assert len(sentences(documentation(Toy)["says"])) == 2


def test_settings_have_their_default_and_what_is_allowed():
    assert entries._settings(Toy).splitlines()[2:] == [
        "| `size` | `null` | at least 1 | Turns. |",
        "| `by` | `reward` | `reward`, `name` | – |",
    ]


def test_every_note_is_of_an_entry():
    """By the folder and the name of its file."""
    for note in (ROOT / "docs/notes").glob("*/*.md"):
        assert note.stem in table(note.parent.name)


def test_a_bias_at_a_glance():
    assert entries.bias_at_a_glance("rloo") == "none"
    assert entries.bias_at_a_glance("grpo") == "up to 0.61"
    assert entries.bias_at_a_glance("gigpo") == "up to 0.078, wrong sign"
    assert entries.bias_at_a_glance("uniform") == "not measured"
