"""Settings of TRL and transformers that have another name in Perturn or are not needed, and their replacements."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Peer(NamedTuple):
    """Answers to a setting of TRL or transformers: the setting to write instead, or why there is none."""

    in_config: str
    """In `TurnConfig`, or where rows are given to `TurnTrainer`."""
    in_recipe: str
    """In a recipe, or as a `key=value` word."""


@cache
def peers() -> dict[str, Peer]:
    """Return the replacement of each setting, from the lines of `peer_settings.txt`."""
    found: dict[str, Peer] = {}
    for line in files("perturn.config").joinpath("peer_settings.txt").read_text("utf-8").splitlines()[1:]:
        names, in_config, *in_recipe = line.split(" | ")
        found |= dict.fromkeys(names.split(), Peer(in_config, *(in_recipe or [in_config])))
    return found
