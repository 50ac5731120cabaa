"""The section `engine:` of a recipe with `name: tinker`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from perturn.engines.protocol import Serving
from perturn.engines.tinker.service_settings import ServiceSettings
from perturn.engines.tinker.stored_policy import stored_policy
from perturn.errors import required
from perturn.table import locate
from perturn.traits import EngineTraits
from perturn.types import Engine


@dataclass(frozen=True)
class TinkerEngineSettings(ServiceSettings):
    """Sampling through a service of the Tinker API, which keeps the policies that it trained."""

    traits: ClassVar[EngineTraits] = EngineTraits(
        serves_checkpoints=True, reads="tinker", distributions=("tinker",)
    )

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        """Check that the client package is installed and the key is set; send nothing."""
        self.check_client()

    def open(self, serving: Serving) -> Engine:
        """Open an engine that samples from the policy at the service; this process does the tokenization."""
        reader = "engine tinker turns conversations into tokens with it"
        remedy = "serve a policy of a run, or a base model with `perturn serve`"
        tokens, context = required(serving.load_tokens, "the tokenizer", reader, remedy)()
        engine: Engine = locate("perturn.engines.tinker.engine:TinkerEngine")(
            self,
            tokens,
            stored_policy(serving.model),
            base=self.base(serving.model),
            policy=serving.policy,
            context=context,
        )
        return engine
