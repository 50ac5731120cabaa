"""Interface between every loss and the trainer."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from perturn.credit import Credit
from perturn.errors import check_fit
from perturn.losses.token_inputs import TokenInput, token_inputs
from perturn.losses.turn_logprobs import TurnLogprobs
from perturn.table import at_defaults, check_members, check_names


@dataclass(frozen=True)
class LossTraits:
    """Inputs of a loss beside the policy's log-probabilities and the weights, and its further methods."""

    needs_rejected: bool = False
    """Whether it compares two trajectories: its rows are pairs."""

    needs_reference: bool = False
    """Whether it reads log-probabilities of the reference."""

    needs_behavior: bool = False
    """Whether it reads the log-probabilities that actions were sampled with: its rows are groups."""

    needs_proximal: bool = False
    """Whether it reads log-probabilities of the policy as training begins."""

    needs_mismatched: bool = False
    """Whether it is a `MismatchedLoss`: its rows are labelled by the sign of their weights."""

    reads_clip: bool = False
    """Whether it multiplies the clip range of a turn by `TurnLogprobs.clip`. Any other loss rejects credits and rows
    that have such factors."""

    reads: frozenset[str | TokenInput] = frozenset()
    """Per-token inputs that it finds in `TurnLogprobs.inputs`: names in `TOKEN_INPUTS`, or inputs with settings."""

    step_statistic: bool = False
    """Whether it is a `CoupledLoss`."""

    diagnostics: bool = False
    """Whether it has `diagnostics`; see `DiagnosedLoss`."""

    turn_diagnostics: bool = False
    """Whether it has `turn_diagnostics`; see `TurnDiagnosedLoss`."""

    @property
    def rows(self) -> str:
        """Kind of the rows that the loss learns from: pairs, groups, single or labelled."""
        if self.needs_behavior:
            return "groups"
        if self.needs_mismatched:
            return "labelled"
        return "pairs" if self.needs_rejected else "single"


class Loss(Protocol):
    """A frozen dataclass of settings that computes a loss once called."""

    @property
    def traits(self) -> LossTraits:
        """Inputs and further methods of the loss; a class variable, or a property if they depend on settings."""

    @property
    def credit(self) -> Credit:
        """The credit of its paper, asked where turns come without a weight."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings by name."""

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss [pairs]; or [trajectories] of a loss that needs no rejected side, which is then None."""

    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return the implicit reward [trajectories], without gradient."""


class CoupledLoss(Loss, Protocol):
    """A loss that couples the pairs of an optimizer step.

    The loss and its diagnostics then take `step`, the statistics of all pairs of the step. Without `step`, the pairs
    given are the step.
    """

    def step_statistic(self, chosen: TurnLogprobs) -> Tensor:
        """Return a number for each pair [pairs], or several [pairs, numbers].

        They depend on reference, weights and counts alone, and so are known of all pairs before the first pass.
        """


class MismatchedLoss(Loss, Protocol):
    """A loss whose reference point is the policy's view of the actions of other rows.

    The loss and its diagnostics then take `step`, the numbers of all rows of the step.
    """

    def mismatch(self, side: TurnLogprobs) -> Tensor:
        """Return a number for each trajectory of one row's prompt and another row's actions [trajectories]."""


class DiagnosedLoss(Loss, Protocol):
    """A loss with values to log."""

    def diagnostics(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> dict[str, Tensor]:
        """Return tensors by name, without gradient; the arguments are the arguments of the loss.

        The trainer logs means: over tokens of [tokens], over trajectories of [trajectories]. They replace what the
        trainer logs under their name. A tensor without a value is not logged.
        """


class TurnDiagnosedLoss(Loss, Protocol):
    """A loss with values to log by the position of a turn."""

    def turn_diagnostics(self, chosen: TurnLogprobs) -> dict[str, Tensor]:
        """Return tensors by name [turns], without gradient."""


def default_traits(kind: type[Loss]) -> LossTraits | None:
    """Return the traits of a loss with its default settings; None if it cannot be made without settings."""
    made = at_defaults(kind)
    whole: Any = kind if made is None else made
    traits = whole.traits if "traits" in dir(whole) else None
    return traits if isinstance(traits, LossTraits) else None


_MEMBERS = ("traits", "credit", "rewards")
_METHODS = {
    "step_statistic": "step_statistic",
    "needs_mismatched": "mismatch",
    "diagnostics": "diagnostics",
    "turn_diagnostics": "turn_diagnostics",
}
"""Trait -> the method that a loss has if, and only if, it has the trait."""


def check_loss(loss: Loss) -> None:
    """Reject a loss that does not keep the protocol.

    Raises:
        ConfigError: If a name is misspelt, a member is missing, a trait comes without its method or the method without
            its trait, or the loss reads an unknown token input.
    """
    kind = type(loss).__name__
    check_names(type(loss), kind="loss", known=(*_MEMBERS, *_METHODS.values()), traits=LossTraits)
    check_members(loss, _MEMBERS, "loss", "perturn.losses.Loss")
    for trait, method in _METHODS.items():
        has, says = method in dir(loss), bool(getattr(loss.traits, trait))
        must = f"be {has}, since the loss has {'a' if has else 'no'} method {method!r}"
        remedy = f"Write LossTraits({trait}={has}), or {'remove' if has else 'add'} the method."
        check_fit(has == says, f"trait {trait} of loss {kind}", must, says, remedy)
    token_inputs(loss.traits.reads)
