"""The text of each token id that occurs in a run, so that a reader needs no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perturn.data.run_files import read_note
from perturn.io.writing import write_whole


def note_tokens(file: Path, ids: Iterable[int], tokenizer: Any) -> None:
    """Keep the text of each token id that occurs.

    Args:
        file: Of the texts.
        ids: Token ids; those that are noted already are left as they are.
        tokenizer: That of the run's policies.
    """
    noted: dict[str, str] = read_note(file, dict[str, str]) or {}
    missing = sorted(set(map(str, ids)) - noted.keys(), key=int)
    if not missing:
        return
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1]  # alone, a token may lose a leading space
    before = tokenizer.decode([anchor])
    for token in missing:
        noted[token] = tokenizer.decode([anchor, int(token)]).removeprefix(before)
    write_whole(file, json.dumps(noted, ensure_ascii=False) + "\n")
