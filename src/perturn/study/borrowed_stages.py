"""Other studies whose finished stages a study takes over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from perturn.config.recipe import Recipe, read_recipe
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, did_you_mean
from perturn.study.settings import Study

_log = logging.getLogger(__name__)


def lent_runs(study: Study) -> Iterator[tuple[Path, Recipe]]:
    """Runs of the studies that a study shares with, with their recipes.

    A run whose recipe this version cannot read is left out, and a warning names it.

    Raises:
        ConfigError: If one of these studies is not there.
    """
    for name in study.share:
        for folder in _runs(study, name):
            if not RunPaths(folder).is_run:
                continue
            try:
                recipe = read_recipe(RunPaths(folder).recipe)
            except ConfigError as error:
                _log.warning(
                    "share: nothing is taken over from %s, whose recipe cannot be read: %s", folder, error
                )
                continue
            yield folder, recipe


def _runs(study: Study, name: str) -> list[Path]:
    """The folders of the runs of another study; none where its results alone are left."""
    other = study.folder.parent / name
    if (other / "runs").is_dir():
        return sorted((other / "runs").iterdir())
    if (other / "cells.json").is_file():
        _log.warning("share: the runs of study %s are gone, so nothing is taken over from it", name)
        return []
    known = {each.parent.name for each in study.folder.parent.glob("*/runs")} - {study.name}
    raise ConfigError(f"share: study {name!r} has no runs in {other / 'runs'}.{did_you_mean(name, known)}")
