"""Provenance of a run: commit, versions, hardware."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from perturn.config.parsing import build
from perturn.config.recipe import Recipe
from perturn.table import package_of
from perturn.table_index import table
from perturn.traits import traits_of

_ALWAYS = ("perturn", "torch", "transformers", "accelerate")
"""Distributions that any result depends on."""


def versions(recipe: Recipe) -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in dict.fromkeys((*_ALWAYS, *_distributions(recipe))):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _distributions(recipe: Recipe) -> Iterator[str]:
    """Distributions that the parts of a recipe name, and those that foreign entries come from."""
    stages = [stage for stage in (recipe.base, recipe.sft, recipe.align) if stage is not None]
    worlds = {"environments": recipe.environment or {}, "engines": recipe.engine}
    yield from traits_of(table("environments").get(str(worlds["environments"].get("name")))).distributions
    yield from build(table("engines"), recipe.engine, "engine").traits.distributions
    for part in (recipe.cluster, *(stage.lora for stage in stages)):
        yield from part.distributions if part else ()
    numbers = [("losses", stage.loss) for stage in stages] + [("credits", recipe.credit or {})]
    selector = recipe.evaluate.select if recipe.evaluate else None
    for kind, section in (*worlds.items(), *numbers, ("selectors", selector or {})):
        if package := package_of(f"perturn.{kind}", str(section.get("name"))):
            yield package


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
