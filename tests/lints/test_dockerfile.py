"""The Dockerfile, read by a linter; `tests/test_container.py` builds it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_linter_finds_nothing():
    """Hadolint, which asks for pinned users, quoted variables and shells that stop at an error."""
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (found.returncode, found.stdout) == (0, "")


def test_every_file_that_is_copied_is_there_and_sent():
    """What COPY names exists, and no line of .dockerignore leaves it out."""
    copied = [
        word
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    ]
    ignored = (ROOT / ".dockerignore").read_text().split()

    assert {"pyproject.toml", "src", "recipes"} <= set(copied)
    assert all((ROOT / word).exists() for word in copied)
    assert not set(copied) & set(ignored)
