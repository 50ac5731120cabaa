"""The text of each token id that occurs in a run, so that a reader needs no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perturn.errors import RunError
from perturn.files import write_whole
from perturn.workspace import Run


def note_tokens(run: Run, ids: Iterable[int], tokenizer: Any) -> None:
    """Keep the text of each token id that occurs in `tokens.json`, so that a reader needs no tokenizer.

    Args:
        run: The run.
        ids: Token ids; those that are noted already are left as they are.
        tokenizer: That of the run's policies.
    """
    file = run.folder / "tokens.json"
    noted = _noted_tokens(file)
    missing = sorted(set(map(str, ids)) - noted.keys(), key=int)
    if not missing:
        return
    anchor = tokenizer.encode("a", add_special_tokens=False)[
        -1
    ]  # alone, some tokenizers drop a leading space
    before = tokenizer.decode([anchor])
    for token in missing:
        noted[token] = tokenizer.decode([anchor, int(token)]).removeprefix(before)
    write_whole(file, json.dumps(noted, ensure_ascii=False) + "\n")


def _noted_tokens(file: Path) -> dict[str, str]:
    try:
        noted: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(noted, dict):
            return noted
        raise ValueError(f"expected an object, got {type(noted).__name__}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} is damaged: {error}. Restore it from a copy, or remove it: what is still to come is noted anew."
        ) from error
