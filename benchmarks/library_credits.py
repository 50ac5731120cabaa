"""Measure the bias and noise of released advantage estimators, for the table of docs/methods/libraries.md.

    .venv-hosts/bin/python benchmarks/library_credits.py
    .venv-hosts/bin/python benchmarks/library_credits.py --check

All groups have three episodes. The command replaces the rows of installed libraries in the page, and keeps all other
rows. With `--check` it writes nothing, and fails if a row differs.
"""

import argparse
import sys
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import typing_extensions

from perturn.adapters.released_estimators import released_estimator
from perturn.credit_check.benchmark_processes import AGENT_CREDIT_BENCH
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "libraries.md"
MARK = "<!-- libraries -->"
"""Mark before and after the table."""
SECTIONS: dict[str, list[dict[str, object]]] = {
    "verl": [
        {"name": "verl:rloo"},
        {"name": "verl:rloo_vectorized"},
        {"name": "verl:grpo"},
        {"name": "verl:grpo", "norm_adv_by_std_in_grpo": False},
        {"name": "verl:grpo_passk"},
        {"name": "verl:opo"},
        {"name": "verl:gpg"},
        {"name": "verl:reinforce_plus_plus"},
        {"name": "verl:reinforce_plus_plus_baseline"},
        {"name": "verl:gae"},
        {"name": "verl:gae", "lam": 0.9},
    ],
    "skyrl": [
        {"name": "skyrl:rloo"},
        {"name": "skyrl:grpo"},
        {"name": "skyrl:grpo", "grpo_norm_by_std": False},
        {"name": "skyrl:maxrl"},
        {"name": "skyrl:reinforce++"},
        {"name": "skyrl:gae"},
    ],
    "trl": [
        {"name": "trl:rloo"},
        {"name": "trl:rloo", "normalize_advantages": True},
        {"name": "trl:grpo"},
        {"name": "trl:grpo", "scale_rewards": "none"},
    ],
    "tinker_cookbook": [{"name": "tinker-cookbook:compute_advantages"}],
}


def cell(cosine: float, bias: float, tolerance: float) -> str:
    """Return a relative bias as text, in the format of the documentation."""
    return "0" if bias <= tolerance else "wrong sign" if cosine < 0 else f"{bias:.3f}"


def line(section: dict[str, object]) -> str:
    """Measure an estimator, and return its row."""
    estimator = released_estimator(section)
    found = [measure(estimator, process, 3) for process in (*PROCESSES, *AGENT_CREDIT_BENCH)]
    # RLOO and others compute some sums in float32, with errors of 1e-7
    cells = [cell(one.cosine, one.relative_bias, 1e-6) for one in found]
    row = [*_named(section), estimator.library, *cells, f"{found[0].noise:.2f}"]
    return f"| {' | '.join(row)} |"


def _named(section: dict[str, object]) -> tuple[str, str]:
    """Return the first two cells of an estimator's row."""
    settings = (f"`{key}={str(value).lower()}`" for key, value in section.items() if key != "name")
    return f"`{section['name']}`", " ".join(settings)


def installed() -> Iterator[dict[str, object]]:
    """Yield the estimators of installed libraries, and print the names of the others."""
    for library, sections in SECTIONS.items():
        if library == "skyrl" and sys.version_info < (3, 12):
            typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # SkyRL needs that of 3.12
        if find_spec(library) is None:
            print(f"{library} is not installed; its lines stay", file=sys.stderr)
        else:
            yield from sections


def documented(page: Path = PAGE) -> list[str]:
    """Return the rows of the page's table, without its head."""
    return page.read_text().split(MARK)[1].strip().splitlines()[2:]


def filled(page: Path = PAGE) -> str:
    """Return the page with new rows for the installed libraries, and all other rows unchanged."""
    before, table, after = page.read_text().split(MARK)
    rows = {tuple(row.split(" | ")[:2]): row for row in table.strip().splitlines()}
    for section in installed():
        name, settings = _named(section)
        rows[f"| {name}", settings] = line(section)
    order = [(f"| {name}", words) for each in SECTIONS.values() for name, words in map(_named, each)]
    head = [key for key in rows if key not in order]
    lines = [rows[key] for key in (*head, *order) if key in rows]
    return f"{before}{MARK}\n{chr(10).join(lines)}\n{MARK}{after}"


def main() -> None:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a line is another one")
    options = parser.parse_args()
    page = filled()
    if page == PAGE.read_text():
        return
    if options.check:
        old = set(documented())
        new = [one for one in page.split(MARK)[1].strip().splitlines()[2:] if one not in old]
        raise SystemExit("\n".join([f"{PAGE.name} differs from what is measured now:", *new]))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
