"""The section `engine:` of a recipe with `name: local`."""

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
    """A transformers model in this process, with a KV cache that keeps each conversation between its turns."""

    cache_gigabytes: Annotated[float, Bound(least=0, most=10**9), EFFORT] = 2.0
    """Size of the KV cache in gigabytes. If it is full, conversations between turns are evicted and new prompts wait.
    Only a single prompt that needs more may exceed it."""
    pack: bool = True
    """On a CPU, multiply by a packed copy of the weights. In float32, answers of a 135M model then take about 0.6 of
    the time. The weights take twice the memory."""

    speculate: Annotated[bool, EFFORT] = True
    """Speculative decoding: verify guessed next tokens together with the newest token, if that saves time. Up to
    rounding, sampled tokens do not change. A `deterministic` run uses no guesses."""

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine: it serves checkpoints in this process."""
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
        """Load a policy's weights into this process, and open an engine that serves them."""
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
