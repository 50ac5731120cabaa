"""Replacements for settings of TRL and transformers that have another name in Perturn or are not needed."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Peer(NamedTuple):
    """Advice for a setting of TRL or transformers: the setting to use instead, or why there is none."""

    in_config: str
    """Advice for `TurnConfig`, or for the rows given to `TurnTrainer`."""
    in_recipe: str
    """Advice for a recipe or a `key=value` override."""


@cache
def peers() -> dict[str, Peer]:
    """Return the advice for each setting, by its name in TRL or transformers, from `peer_settings.txt`."""
    found: dict[str, Peer] = {}
    for line in files("perturn.config").joinpath("peer_settings.txt").read_text("utf-8").splitlines()[1:]:
        names, in_config, *in_recipe = line.split(" | ")
        found |= dict.fromkeys(names.split(), Peer(in_config, *(in_recipe or [in_config])))
    return found
