"""Put the tables of studies into the pages of results, so that no number is typed by hand.

Each block `<!-- study NAME -->` ... `<!-- end -->` gets what `studies/results/NAME/table.md` holds, and each
`<!-- row NAME: FIRST CELL -->` ... `<!-- -->` the difference of one row of it, with its size and p: in points of
success, or in the score with `row NAME: FIRST CELL, score`. With `--check` nothing is written, and what is not equal
is an error.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BEGIN, _END = re.compile(r"<!-- study (\S+) -->"), "<!-- end -->"
_ROW = re.compile(r"<!-- row (\S+): ([^>]+?)(, score)? -->.*?<!-- -->")


def filled(page: str, studies: Path) -> str:
    """A page with the tables of its studies.

    Args:
        page: Its Markdown.
        studies: Folder of the studies' folders.

    Raises:
        ValueError: If a block does not end, or a table has no such row.
        OSError: If a study has no table.
    """

    def row(match: re.Match[str]) -> str:
        name, key, scored = match.groups()
        said = _difference(_table(studies, name), key, "score" if scored else "points")
        return f"<!-- row {name}: {key}{scored or ''} -->{said}<!-- -->"

    first, *rest = _BEGIN.split(_ROW.sub(row, page))
    found = [first]
    for name, block in zip(rest[::2], rest[1::2], strict=True):
        _, end, after = block.partition(_END)
        if not end:
            raise ValueError(f"<!-- study {name} --> has no {_END}; add it.")
        found.append(f"<!-- study {name} -->\n\n{_table(studies, name)}\n{_END}{after}")
    return "".join(found)


def _table(studies: Path, name: str) -> str:
    return (studies / name / "table.md").read_text(encoding="utf-8")


def _difference(table: str, key: str, unit: str) -> str:
    """The difference, in "points" or "score", that the row has which begins with a cell; with its size and p.

    Raises:
        ValueError: If no row with such a difference begins so.
    """
    head: list[str] = []
    for line in table.splitlines():
        cells = line.strip("| ").split(" | ")
        if any(cell.endswith(f", {unit}") for cell in cells):
            head = cells
        elif head and cells[0] == key:
            said = dict(zip(head, cells, strict=True))
            found = next(cell for name, cell in said.items() if name.endswith(f", {unit}"))
            p = next(name for name in ("p", "p (Holm)") if name in said)
            return f"{found}; {said['tasks × seeds']}; {p} {said[p]}"
        elif not line:
            head = []
    raise ValueError(f"no row of the table begins with {key!r} and has {unit}.")


def main(arguments: list[str] | None = None) -> str | None:
    """Fill all pages; the text of the first error, or None."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a table is not the study's"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of docs/ and studies/")
    asked = parser.parse_args(arguments)
    for page in sorted((asked.root / "docs/results").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        try:
            fresh = filled(text, asked.root / "studies/results")
        except (OSError, ValueError) as error:
            return f"{page.name}: {error}"
        if fresh != text and asked.check:
            return f"{page.name}: a table is not that of its study; run `python docs/tables.py`."
        if fresh != text:
            page.write_text(fresh, encoding="utf-8")
    return None


if __name__ == "__main__":
    raise SystemExit(main())
