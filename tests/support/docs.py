"""Pages of the documentation and their code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(file, language, section=""):
    """Return the code blocks of a page in one language, or only the blocks after a heading."""
    text = (ROOT / file).read_text().split(section, 1)[1] if section else (ROOT / file).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]
