"""The section `backend:` of a recipe with `name: tinker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from perturn.backends.protocol import BackendTraits, Training
from perturn.bounds import EFFORT, Bound
from perturn.config.sections import Lora, Train
from perturn.engines.tinker.service_settings import ServiceSettings
from perturn.errors import check_fit
from perturn.table import locate

_ALPHA = 32
"""Value of `lora_alpha` at every known service; the API has no setting for it."""


@dataclass(frozen=True)
class TinkerSettings(ServiceSettings):
    """Training of adapters through a service of the Tinker API, such as SkyRL's server, without a local model.

    The service computes log-probabilities and stores the policies; Perturn computes the loss.
    """

    request_tokens: Annotated[int, Bound(least=1), EFFORT] = 65536
    """Largest number of tokens in one request; a longer sequence gets a request of its own."""

    traits: ClassVar[BackendTraits] = BackendTraits(stores="tinker", distributions=("tinker",))

    def check(self, trainings: Mapping[str, Train], model: str, goes_on: bool) -> None:
        """Check that the service answers, has a known gradient convention, and supports the recipe."""
        _check_trainings(trainings)
        self.check_client()
        opened = locate("perturn.backends.tinker.service_training:ServiceTraining")(self, model)
        try:
            for name, settings in trainings.items():
                opened.check(name, settings)
        finally:
            opened.close()

    def open(self, model: str) -> Training:
        """Open a session at the service."""
        opened: Training = locate("perturn.backends.tinker.service_training:ServiceTraining")(self, model)
        return opened


def _check_trainings(trainings: Mapping[str, Train]) -> None:
    """Raise a `ConfigError` if a training has settings that the Tinker API does not support."""
    fixed = Lora(alpha=_ALPHA)
    for name, settings in trainings.items():
        if settings.lora is None:
            continue
        for key in ("alpha", "dropout", "target_modules"):
            given, only = getattr(settings.lora, key), getattr(fixed, key)
            remedy = "The Tinker API has no setting for it."
            check_fit(given == only, f"{name}.lora.{key}", f"be {only}", given, remedy)
        off, must = not settings.gradient_checkpointing, "be off with backend.name=tinker"
        check_fit(off, f"{name}.gradient_checkpointing", must, True, "The service decides that.")
    ranks = {f"{name}.lora.rank": each.lora.rank for name, each in trainings.items() if each.lora}
    must = "be one rank, since each training continues the adapters of the last one"
    check_fit(len(set(ranks.values())) < 2, " and ".join(ranks), must, list(ranks.values()))
