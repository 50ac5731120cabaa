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


def test_every_script_is_in_the_page():
    assert all(file.read_text(encoding="utf-8") in script(CODE) for file in ASSETS.glob("*.js"))
