"""Interface between a loss and the trainer."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, cast

from torch import Tensor

from perturn.credit import Credit
from perturn.errors import ConfigError, check_fit, check_none, check_type
from perturn.losses.token_inputs import TokenInput, token_inputs
from perturn.losses.turn_logprobs import TurnLogprobs
from perturn.table import at_defaults, check_members, check_names


@dataclass(frozen=True)
class LossTraits:
    """Inputs that a loss needs, besides the policy's log-probabilities and the weights, and its optional methods."""

    needs_rejected: bool = False
    """Whether the loss compares a chosen and a rejected trajectory. Its rows are then pairs."""

    needs_reference: bool = False
    """Whether the loss reads log-probabilities under the reference policy."""

    needs_behavior: bool = False
    """Whether the loss reads log-probabilities under the behavior policy. Its rows are then groups."""

    needs_proximal: bool = False
    """Whether the loss reads log-probabilities of the policy before training, as the training code computes them."""

    needs_mismatched: bool = False
    """Whether the loss is a `MismatchedLoss`. The sign of the weights is then the label of a row."""

    reads_clip: bool = False
    """Whether the loss multiplies the clip range of a turn by `TurnLogprobs.clip`. If False, credits and rows with such
    factors are rejected."""

    reads: frozenset[str | TokenInput] = frozenset()
    """Per-token inputs that the loss reads from `TurnLogprobs.inputs`: names in `TOKEN_INPUTS`, or inputs with
    settings."""

    step_statistic: bool = False
    """Whether the loss is a `CoupledLoss`."""

    diagnostics: bool = False
    """Whether the loss has a method `diagnostics`; see `DiagnosedLoss`."""

    turn_diagnostics: bool = False
    """Whether the loss has a method `turn_diagnostics`; see `TurnDiagnosedLoss`."""

    @property
    def rows(self) -> str:
        """Kind of rows that the loss trains on: pairs, groups, single or labelled."""
        if self.needs_behavior:
            return "groups"
        if self.needs_mismatched:
            return "labelled"
        return "pairs" if self.needs_rejected else "single"


class Loss(Protocol):
    """Frozen dataclass of settings that computes a loss when called."""

    @property
    def traits(self) -> LossTraits:
        """Inputs and optional methods of the loss; a class variable, or a property if they depend on the settings."""

    @property
    def credit(self) -> Credit:
        """Credit of the loss's paper, which is used if the rows have no weights."""

    def __init__(self, **settings: Any) -> None:
        """Store the settings, which are given as keyword arguments."""

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss [pairs], or [trajectories] if the loss needs no rejected side; `rejected` is then None."""

    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return the implicit reward [trajectories], without gradient."""


class CoupledLoss(Loss, Protocol):
    """Loss in which the value of a pair depends on all pairs of the optimizer step.

    The loss and its `diagnostics` take an argument `step`: the statistics of all pairs of the optimizer step. If `step`
    is None, the given pairs are the whole step.
    """

    def step_statistic(self, chosen: TurnLogprobs) -> Tensor:
        """Return one statistic per pair [pairs], or several [pairs, statistics].

        A statistic depends on the reference, the weights and counts alone. So it is known for all pairs before the
        first forward pass of a step.
        """


class MismatchedLoss(Loss, Protocol):
    """Loss whose reference point is computed from mismatched trajectories, as in KTO.

    The loss and its `diagnostics` take an argument `step`: the result of `mismatch` for all rows of the optimizer step.
    """

    def mismatch(self, side: TurnLogprobs) -> Tensor:
        """Return one number for each mismatched trajectory: one row's prompt, another row's actions [trajectories]."""


class DiagnosedLoss(Loss, Protocol):
    """Loss that returns values to log."""

    def diagnostics(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> dict[str, Tensor]:
        """Return tensors by name, without gradient; takes the arguments of the loss.

        The trainer logs the mean of a tensor, over its tokens or its trajectories. If the trainer logs a value of the
        same name, the tensor replaces it. An empty tensor is not logged.
        """


class TurnDiagnosedLoss(Loss, Protocol):
    """Loss that returns values to log by the position of a turn in its trajectory."""

    def turn_diagnostics(self, chosen: TurnLogprobs) -> dict[str, Tensor]:
        """Return tensors by name [turns], without gradient."""


def default_traits(kind: type[Loss]) -> LossTraits | None:
    """Return the traits of a loss with its default settings; None if a setting has no default."""
    made = at_defaults(kind)
    whole: Any = kind if made is None else made
    traits = whole.traits if "traits" in dir(whole) else None
    return traits if isinstance(traits, LossTraits) else None


def loss_values(loss: Loss, chosen: TurnLogprobs, rejected: Any, **step: Any) -> Tensor:
    """Return the loss of each row [rows]. The rejected side is None if the loss reads one side.

    Raises:
        ConfigError: If the loss does not return one floating-point number for each row, or has no gradient in training.
    """
    whose = f"loss {type(loss).__name__}"
    found = _of_rows(loss(chosen, rejected, **step), chosen, whose)
    if chosen.policy.requires_grad and not found.requires_grad:
        raise ConfigError(
            f"{whose} has no gradient. Compute it from chosen.policy, without detach() or no_grad() around the result."
        )
    return found


def row_rewards(loss: Loss, side: TurnLogprobs) -> Tensor:
    """Return the implicit reward of each row [rows].

    Raises:
        ConfigError: If `rewards` of the loss does not return one floating-point number for each row.
    """
    return _of_rows(loss.rewards(side), side, f"rewards of loss {type(loss).__name__}")


def _of_rows(found: Any, side: TurnLogprobs, whose: str) -> Tensor:
    """Check that a loss returned a tensor with a number for each row: it is averaged over the rows later."""
    rows = side.num_trajectories
    is_tensor = isinstance(found, Tensor) and found.is_floating_point()
    got = list(found.shape) if is_tensor else found
    must = f"return a tensor of floating-point numbers [{rows}], one for each row"
    check_fit(is_tensor and found.shape == (rows,), whose, must, got)
    return cast(Tensor, found)


_MEMBERS = ("traits", "credit", "rewards")
_METHODS = {
    "step_statistic": "step_statistic",
    "needs_mismatched": "mismatch",
    "diagnostics": "diagnostics",
    "turn_diagnostics": "turn_diagnostics",
}
"""Trait -> method that a loss must have if it has the trait, and must not have otherwise."""


def check_loss(loss: Loss) -> None:
    """Reject a loss that does not implement the protocol.

    Raises:
        ConfigError: If a name is misspelt, a member is missing, a trait lacks its method or a method its trait. Also if
            a method has other arguments, or the loss reads an unknown token input.
    """
    kind = type(loss).__name__
    check_names(type(loss), kind="loss", known=(*_MEMBERS, *_METHODS.values()), traits=LossTraits)
    check_members(loss, (*_MEMBERS, "__call__"), "loss", "perturn.losses.Loss")
    check_type(f"traits of loss {kind}", loss.traits, LossTraits, "a perturn.losses.LossTraits")
    for trait, method in _METHODS.items():
        has, says = method in dir(loss), bool(getattr(loss.traits, trait))
        must = f"be {has}, since the loss has {'a' if has else 'no'} method {method!r}"
        remedy = f"Write LossTraits({trait}={has}), or {'remove' if has else 'add'} the method."
        check_fit(has == says, f"trait {trait} of loss {kind}", must, says, remedy)
    check_none(_misfits(loss))
    token_inputs(loss.traits.reads)


def _misfits(loss: Loss) -> Iterator[str]:
    """Yield an error message for each method that cannot take the arguments of training."""
    has_step = loss.traits.step_statistic or loss.traits.needs_mismatched
    takes = dict.fromkeys(("__call__", "diagnostics"), ("chosen, rejected", has_step))
    takes |= dict.fromkeys(("rewards", "mismatch"), ("side", False))
    takes |= dict.fromkeys(("step_statistic", "turn_diagnostics"), ("chosen", False))
    for name in sorted(takes.keys() & set(dir(loss))):
        given, step = takes[name]
        try:
            signature(getattr(loss, name)).bind(*given.split(", "), **({"step": None} if step else {}))
        except TypeError as error:
            said = f"def {name}(self, {given}{', step=None' if step else ''})"
            yield f"{name} of loss {type(loss).__name__} cannot be called: {error}. Write {said}."
        except ValueError:  # compiled code without a signature
            continue
