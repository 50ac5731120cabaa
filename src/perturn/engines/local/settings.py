"""The section `engine:` of a recipe that names `local`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from perturn.bounds import EFFORT, Bound, bounded
from perturn.engines.protocol import Serving
from perturn.table import locate
from perturn.traits import EngineTraits
from perturn.types import Engine


@dataclass(frozen=True)
@bounded
class LocalSettings:
    """A transformers model in this process, which keeps each conversation's keys and values between its turns."""

    cache_gigabytes: Annotated[float, Bound(least=0, most=10**9), EFFORT] = 2.0
    """Memory for keys and values. Prompts wait, and kept ones are evicted, rather than exceed it; a single
    prompt may."""
    pack: bool = True
    """On a CPU, multiply by a packed copy of the weights: in float32 an answer of a 135M model takes
    about 0.6 of the time. Weights take twice the memory."""

    speculate: Annotated[bool, EFFORT] = True
    """Feed guesses of the next tokens along with the newest one, where that saves time. Up to rounding, a token is
    drawn as without them; a `deterministic` run does not use them."""

    @property
    def traits(self) -> EngineTraits:
        """It serves checkpoints, in this process."""
        return EngineTraits(
            True,
            cache_gigabytes=self.cache_gigabytes,
            computes_here=True,
            swaps_weights=True,
            adapter_rank=sys.maxsize,
        )

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        """Build the model without its weights, and check that the engine can serve it."""
        locate("perturn.engines.local.served_models:check_layers")(empty_model())

    def open(self, serving: Serving) -> Engine:
        """Serve a policy with its weights in this process."""
        loaded = serving.load()
        engine: Engine = locate("perturn.engines.local.engine:LocalEngine")(
            loaded.model.to(loaded.device),
            loaded.tokens,
            name=loaded.name,
            context=loaded.context,
            cache_gigabytes=self.cache_gigabytes,
            pack=self.pack,
            speculate=self.speculate and not serving.deterministic,
        )
        return engine
