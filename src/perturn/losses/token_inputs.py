"""Per-token inputs of a loss: one number per token, such as its entropy, besides the usual log-probabilities."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from perturn.errors import check_fit, check_free, check_known
from perturn.table import Table, check_members, check_names

FIELDS = ("policy", "reference", "behavior", "proximal")
"""Names of the log-probabilities that have a field in `TurnLogprobs`. An input cannot have such a name."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Predictions for some tokens of a batch, with full logits, from which an input is computed."""

    hidden: Tensor
    """Last hidden states [tokens, features]."""

    logits: Tensor
    """Logits after scaling and soft-capping, at least in float32 [tokens, vocabulary]."""

    target: Tensor
    """Ids of the tokens that were generated [tokens]."""

    @cached_property
    def logprobs(self) -> Tensor:
        """Log-probability of every token of the vocabulary, in nats [tokens, vocabulary]."""
        return self.logits.log_softmax(-1)


@dataclass(frozen=True)
class TokenInputTraits:
    """Source of a per-token input."""

    policy: str | None = None
    """Name or folder of a frozen policy. The input is then the log-probability of each token under this policy, in
    nats, computed once before training. None: the input is computed from the trained policy, in each pass."""


class TokenInput(Protocol):
    """Frozen dataclass of settings that defines one number per token; see `TokenInputTraits`."""

    @property
    def name(self) -> str:
        """Key of the input in `TurnLogprobs.inputs`."""

    @property
    def traits(self) -> TokenInputTraits:
        """Source of the input."""


class PolicyInput(TokenInput, Protocol):
    """Input that is computed from the trained policy, with gradient; its `traits.policy` is None."""

    def __call__(self, chunk: Chunk) -> Tensor:
        """Return one number per token, floating point [tokens]. It must depend on the token's own row alone."""


TOKEN_INPUTS: Table[type[TokenInput]] = Table(
    "perturn.token_inputs", {"entropy": "perturn.losses.token_entropy:TokenEntropy"}
)
"""Name of a per-token input -> its class, a frozen dataclass of settings."""


def token_inputs(reads: Collection[str | TokenInput]) -> dict[str, TokenInput]:
    """Return the inputs that a loss reads, by name, in alphabetical order of the names.

    Args:
        reads: Inputs with settings, and names in `TOKEN_INPUTS`. A name stands for the input with default settings.

    Raises:
        ConfigError: If a name is unknown, if two inputs have one name, or if an input does not implement `TokenInput`.
    """
    found: dict[str, TokenInput] = {}
    for each in reads:
        if isinstance(each, str):
            check_known(each, TOKEN_INPUTS, f"there is no token input {each!r}")
        entry = TOKEN_INPUTS[each]() if isinstance(each, str) else each
        _check(entry)
        says = f"token input {type(entry).__name__} has the name"
        remedy = f"All inputs that a loss reads need different names, none of {', '.join(FIELDS)}."
        check_free(entry.name, [*found, *FIELDS], says, remedy)
        found[entry.name] = entry
    return dict(sorted(found.items()))


def _check(entry: TokenInput) -> None:
    """Reject an input that lacks or misspells a member of `TokenInput`."""
    members = ("name", "traits")
    check_names(type(entry), kind="token input", known=members, traits=TokenInputTraits)
    check_members(entry, members, "token input", "perturn.losses.token_inputs.TokenInput")
    fits = entry.traits.policy is not None or callable(entry)
    must = "be callable on a Chunk, or name a frozen policy in TokenInputTraits(policy=...)"
    check_fit(fits, f"token input {type(entry).__name__}", must, entry)
