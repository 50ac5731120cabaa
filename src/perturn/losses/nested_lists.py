"""Checks of nested lists, padded rows and flat ids of log-probabilities, and flattening of lists."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

NestedLogprobs = Sequence[Sequence[Sequence[float] | Tensor]]
"""Log-probabilities, in nats `[trajectories][turns][tokens]`; the innermost level may be a tensor."""


def turn_lengths(name: str, nested: NestedLogprobs) -> list[list[int]]:
    """Return the number of tokens of each turn `[trajectories][turns]`.

    Raises:
        ValueError: If a level is empty, or a turn is no list or one-dimensional tensor.
    """
    if not len(nested):
        raise ValueError(f"{name} must hold at least one trajectory, got none.")
    for k, turns in enumerate(nested):
        if not hasattr(turns, "__len__") or len(turns) == 0:
            raise ValueError(f"{name} must hold at least one turn in trajectory {k}, got none.")
        for i, turn in enumerate(turns):
            where = f"{name}, trajectory {k}, turn {i}"
            if not hasattr(turn, "__len__") or (isinstance(turn, Tensor) and turn.dim() != 1):
                raise ValueError(f"{where}: expected the log-probabilities [tokens], got {turn!r}.")
            if len(turn) == 0:
                raise ValueError(f"{where}: expected at least one token, got none.")
    return [[len(turn) for turn in turns] for turns in nested]


def check_same_nesting(name: str, policy: list[list[int]], other: list[list[int]]) -> None:
    """Raise an error unless an input has the nesting of `policy`; the message names the first difference.

    Args:
        name: Name of the input.
        policy: Number of tokens of each turn of `policy` `[trajectories][turns]`.
        other: Number of tokens of each turn of the input `[trajectories][turns]`.
    """
    if len(policy) != len(other):
        raise ValueError(f"policy holds {len(policy)} trajectories, but {name} {len(other)}.")
    for k, turns in enumerate(zip(policy, other, strict=True)):
        for i, (own, found) in enumerate(zip_longest(*turns, fillvalue=0)):
            if own != found:
                raise ValueError(f"trajectory {k}, turn {i}: policy has {own} tokens, but {name} {found}.")


def flatten(nested: NestedLogprobs) -> Tensor:
    """Concatenate the tokens of all turns into one tensor [tokens]."""
    return torch.cat([_as_tensor(turn) for turns in nested for turn in turns])


def _as_tensor(turn: Sequence[float] | Tensor) -> Tensor:
    """Return one turn as a tensor [tokens]. A tensor or a list of tensors keeps its gradient."""
    if isinstance(turn, Tensor):
        return turn
    if any(isinstance(value, Tensor) for value in turn):
        return torch.stack([torch.as_tensor(value) for value in turn])
    return torch.tensor(turn, dtype=torch.get_default_dtype())


_KINDS = {"turn": "integer", "trajectory": "integer", "has_spread": "boolean"}
"""Name of an input -> kind of its numbers. Any other input is floating point."""


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise an error unless log-probabilities are floating point, ids are integers, and `has_spread` is boolean."""
    kind = _KINDS.get(name, "floating point")
    floating, boolean = tensor.dtype.is_floating_point, tensor.dtype == torch.bool
    if kind == "floating point" and not floating:
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}.")
    if kind == "integer" and (floating or boolean or tensor.dtype.is_complex):
        raise ValueError(f"{name} must hold integer ids, got {tensor.dtype}.")
    if kind == "boolean" and not boolean:
        raise ValueError(f"{name} must be boolean, got {tensor.dtype}.")


def check_padded(values: Mapping[str, Tensor | None], turn: Tensor) -> None:
    """Raise an error unless all inputs have the shape of `turn`, and each row has a token that carries loss.

    Args:
        values: Name -> input [trajectories, positions]; None: not given.
        turn: Turn id of each token; -1: no loss [trajectories, positions].
    """
    if turn.dim() != 2:
        raise ValueError(f"turn must have shape [trajectories, positions], got {list(turn.shape)}.")
    check_dtype("turn", turn)
    for name, tensor in values.items():
        if tensor is not None and tensor.shape != turn.shape:
            raise ValueError(
                f"{name} must have shape {list(turn.shape)} as turn has, got {list(tensor.shape)}."
            )
    empty = (turn < 0).all(dim=1).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"trajectory {empty[0]} must hold at least one token with turn >= 0, got none.")
    if turn.numel() and int(turn.min()) < -1:
        raise ValueError(f"turn must be -1 (no loss) or a turn id >= 0, got {int(turn.min())}.")


def segments(turn: Tensor, trajectory: Tensor) -> tuple[Tensor, int, int]:
    """Check the ids; return the index of each token's turn [tokens], and the numbers of turns and of trajectories.

    Raises:
        ValueError: If an id is negative, ids decrease, or a trajectory has no token.
    """
    trajectory_change, turn_change = trajectory.diff(), turn.diff()
    starts_turn = (trajectory_change != 0) | (turn_change != 0)
    turn_index = torch.cat([starts_turn.new_zeros(1), starts_turn]).cumsum(0)
    facts = [
        (trajectory[0] != 0) | ((trajectory_change < 0) | (trajectory_change > 1)).any(),
        turn.min(),
        ((turn_change < 0) & (trajectory_change == 0)).any(),
        turn_index[-1] + 1,
        trajectory[-1] + 1,
    ]
    # One transfer for all facts, since each transfer waits for the device.
    gap, lowest_turn, unsorted, num_turns, num_trajectories = torch.stack([f.long() for f in facts]).tolist()
    if gap:
        raise ValueError("trajectory ids must be 0..n-1, not decreasing, each with at least one token.")
    if lowest_turn < 0:
        raise ValueError(
            f"turn ids must be >= 0, got {lowest_turn}. "
            "Leave out tokens that carry no loss, or use TurnLogprobs.from_padded."
        )
    if unsorted:
        raise ValueError("turn ids must not decrease: the tokens of a turn of a trajectory stand together.")
    return turn_index, num_turns, num_trajectories
