"""The section `backend:` of a recipe that names `tinker`."""

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
"""Scale of the adapters of every service that is known; the API has no setting for it."""


@dataclass(frozen=True)
class TinkerSettings(ServiceSettings):
    """Training of adapters through a service of the Tinker API, such as SkyRL's server, with no model in this process.

    The service computes log-probabilities and keeps the policies; the loss is computed here.
    """

    request_tokens: Annotated[int, Bound(least=1), EFFORT] = 65536
    """Tokens of one request, at most; a longer sequence is a separate request."""

    traits: ClassVar[BackendTraits] = BackendTraits(stores="tinker", distributions=("tinker",))

    def check(self, trainings: Mapping[str, Train], model: str, goes_on: bool) -> None:
        """Check that the service answers, scales gradients in a known way, and supports the recipe."""
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
    """Reject settings of trainings that the API does not support."""
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
