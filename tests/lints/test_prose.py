"""STYLE section 8: docstrings, errors, help, reports and pages are prose that is read once."""

import pytest

from support.docs import PAGES, ROOT
from support.prose import newest_section, page_offences, source_offences, template_offences

SOURCES = sorted((ROOT / "src/perturn").rglob("*.py"))
GAMES = {"alfworld", "scienceworld", "webshop"}
"""Packages whose strings are texts and word lists of games."""


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_source_file_is_plain_english(file):
    assert source_offences(file.read_text(encoding="utf-8"), games=bool(GAMES & set(file.parts))) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_plain_english(page):
    assert page_offences((ROOT / page).read_text(encoding="utf-8")) == []


def test_the_newest_changes_are_plain_english():
    assert page_offences(newest_section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("file", sorted((ROOT / "src/perturn").rglob("*.j2")), ids=lambda file: file.name)
def test_a_template_is_plain_english(file):
    """What the report and a study's page say."""
    assert template_offences(file.read_text(encoding="utf-8")) == []


LONG = "one two three four five six seven eight nine ten " * 3 + "and one"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("The scores are those of the policy.", "a pronoun"),
        ("The rate is that of the schedule.", "a pronoun"),
        ("Take one that fits.", "a pronoun"),
        ("Use the latter.", "a pronoun"),
        ("Episodes are played on from a turn.", "resume or branch"),
        ("The policy is let go.", "delete"),
        ("The key goes unread.", "ignored"),
        ("Rows are refused for their length.", "rejected"),
        ("The token behind it has loss.", "after"),
        ("A task panel is fixed.", "task list"),
        ("It gains two points in the mean.", "average"),
        (f"{LONG}.", "32 words"),
    ],
)
def test_what_the_check_finds(said, why):
    """In a docstring, an error, a page, an item, a cell of a table; but not in code."""
    for source in (f'"""{said}"""', f'"""Raise."""\nraise ValueError("The file: {said}")'):
        assert [why in each for each in source_offences(source)] == [True]
    for page in (said, f"# Title\n\n- {said}", f"| a | b |\n|---|---|\n| {said} | c |"):
        assert [why in each for each in page_offences(page)] == [True]
    assert [why in each for each in template_offences(f"<p>{{{{ n }}}} runs.</p><p>{said}</p>")] == [True]
    assert page_offences(f"```text\n{said}\n```\n") == []


@pytest.mark.parametrize(
    "source",
    [
        '"""How numbers are written."""',
        '"""A text without an end"""',
        'def run():\n    """Whether it runs."""',
        'class Setting:\n    size: int\n    """Those of the host."""',
        'class Setting:\n    size: int\n    """As the host has it."""',
    ],
)
def test_what_is_not_a_sentence(source):
    """Of a module, a function and an attribute."""
    assert any("opens with" in each or "does not end" in each for each in source_offences(source))


def test_what_is_a_sentence():
    """A clause describes an attribute and a property; two short sentences stand for a long one."""
    source = (
        'class Setting:\n    """A setting."""\n\n    size: int\n    """Whether it is large."""\n\n'
        '    @property\n    def small(self):\n        """Whether it is small."""\n'
    )
    assert source_offences(source) == []
    assert page_offences(f"{LONG.replace('ten ', 'ten. ')}.") == []
