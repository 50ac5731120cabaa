"""The command line of scripts that write pages and figures of this site from recorded rows."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_check(
    script: str, about: str, make: Callable[[Path], dict[str, str]], arguments: Sequence[str] | None
) -> str | None:
    """Write what a script makes, or with `--check` compare it with the files; return the first error, or None.

    Args:
        script: Name of the script, for its errors.
        about: Text of `--help`.
        make: From the folder of docs/ and studies/ to the text of each file, by its path under docs/.
        arguments: Of the command line; None: the arguments of the process.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is not as made"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of docs/ and studies/")
    asked = parser.parse_args(arguments)
    try:
        made = make(asked.root)
    except (OSError, ValueError) as error:
        return str(error)
    for name, text in made.items():
        file = asked.root / "docs" / name
        if asked.check and (not file.is_file() or file.read_text(encoding="utf-8") != text):
            return f"{name} is not what the recorded rows say; run `python docs/{script}`."
        if not asked.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return None
