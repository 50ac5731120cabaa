"""The page's scripts are sound before a browser sees them."""

import shutil
import subprocess

import pytest

from perturn.report.report_page import ASSETS, CODE, script


def test_the_joined_script_parses(tmp_path):
    """All files share one scope, so a name that two of them declare is an error here."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (tmp_path / "page.js").write_text(script(CODE), encoding="utf-8")

    checked = subprocess.run([node, "--check", tmp_path / "page.js"], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("]
)
def test_no_script_parses_markup_or_fetches(word):
    """Text enters the page as text nodes alone."""
    assert [file.name for file in ASSETS.glob("*.js") if word in file.read_text(encoding="utf-8")] == []


SORTED = """
const cell = (text, value) => ({ textContent: text, dataset: value === undefined ? {} : { value } });
const row = (name, ...at) => ({ name, cells: [cell(...at)] });
const heads = [{ attributes: {}, textContent: "kl",
  getAttribute(name) { return this.attributes[name] ?? null; },
  setAttribute(name, value) { this.attributes[name] = value; },
  removeAttribute(name) { delete this.attributes[name]; } }];
const rows = [row("none", "–", ""), row("high", "2", "2"), row("low", "-1", "-1"), row("dash", "–")];
const body = { rows, append(...sorted) { console.log(sorted.map((each) => each.name).join(" ")); } };
const table = { querySelectorAll: () => heads, tBodies: [body] };
const announce = () => {};
sortTable(table, 0);
sortTable(table, 0);
"""


def test_missing_values_are_last_in_both_directions():
    """An empty value and a dash; a negative number is below zero, and neither of them is zero."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    code = (ASSETS / "tables.js").read_text(encoding="utf-8") + SORTED

    done = subprocess.run([node, "-e", code], capture_output=True, text=True)

    assert done.stdout.splitlines() == ["high low none dash", "low high none dash"], done.stderr


def test_every_script_is_in_the_page():
    assert all(file.read_text(encoding="utf-8") in script(CODE) for file in ASSETS.glob("*.js"))
