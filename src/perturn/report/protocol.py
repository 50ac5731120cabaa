"""The protocol of a score, in one line: what must be equal before two scores are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def protocol_line(stamp: Mapping[str, Any]) -> str:
    """Conditions of a score, in words; fields that an older stamp lacks are left out.

    Args:
        stamp: `evaluation/protocol.json` of a run.
    """
    parts = [
        _where(stamp),
        _panel(stamp),
        _limits(stamp.get("max_turns")),
        _history(stamp.get("history")),
        "admissible commands listed" if stamp.get("list_admissible") else "",
        _decoding(stamp.get("decoding")),
        f"seed {stamp['seed']}" if "seed" in stamp else "",
        *(
            f"departs from the protocol in {name}: {values['here']} instead of {values['protocol']}"
            for name, values in (stamp.get("departures") or {}).items()
        ),
    ]
    return "; ".join(part for part in parts if part)


def _where(stamp: Mapping[str, Any]) -> str:
    where = f" on {stamp['environment']}" if stamp.get("environment") else ""
    return f"{stamp.get('name') or 'unnamed protocol'}{where}"


def _panel(stamp: Mapping[str, Any]) -> str:
    split = f"split {stamp['split']}" if stamp.get("split") else ""
    n = f"n = {stamp['n']}" if "n" in stamp else ""
    panel = f"panel {stamp['panel_sha256'][:12]}" if stamp.get("panel_sha256") else ""
    return ", ".join(part for part in (split, n, panel) if part)


def _limits(limits: Any) -> str:
    if not isinstance(limits, Mapping) or not limits:
        return ""
    low, high = min(limits.values()), max(limits.values())
    return f"at most {high} turns" if low == high else f"at most {low} to {high} turns by kind"


def _history(history: Any) -> str:
    if history is None:
        return ""
    return "full history" if history == "full" else f"history of {history} turns"


def _decoding(decoding: Any) -> str:
    if not isinstance(decoding, Mapping):
        return ""
    temperature = decoding.get("temperature")
    how = "greedy" if temperature == 0 else f"temperature {temperature}, top-p {decoding.get('top_p')}"
    return f"{how}, at most {decoding.get('max_new_tokens')} tokens a turn"
