"""The weights of a model's folder, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a folder, by the names of the model's state; each tensor is read when it is asked for."""

    def __init__(self, found: Mapping[str, tuple[Any, str]], dtype: torch.dtype) -> None:
        """Hold the open file and the name in it for each name; only `stored_weights` makes one."""
        self._stored, self._dtype = found, dtype

    def __getitem__(self, name: str) -> Tensor:
        file, key = self._stored[name]
        tensor: Tensor = file.get_tensor(key)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def take_weights(model: Any, folder: str | Path, stored: StoredWeights | None) -> None:
    """Give a model the weights of a folder, which `stored_weights` has found or only transformers can read."""
    if stored is None:
        model.load_state_dict(type(model).from_pretrained(folder, dtype=model.dtype).state_dict())
        return
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            weight.copy_(stored[key])


def stored_weights(folder: str | Path, model: Any, dtype: torch.dtype) -> StoredWeights | None:
    """Return the weights of a folder as a model's state, in a type to compute in.

    Args:
        folder: What `save_pretrained` wrote.
        model: A model of the same architecture; it may have no weights. Tensors that it ties are stored once.
        dtype: Of the weights.

    Returns:
        None if the files have other names or shapes than the model, which transformers alone can translate.
    """
    read: Any = safe_open
    files = [read(file, framework="pt") for file in sorted(Path(folder).glob("model*.safetensors"))]
    held = {name: file for file in files for name in file.keys()}  # noqa: SIM118  it is no mapping
    state = model.state_dict(keep_vars=True)
    stored = {id(tensor): name for name, tensor in state.items() if name in held}
    found = {}
    for name, tensor in state.items():
        key = name if name in held else stored.get(id(tensor))
        if key is None or tuple(held[key].get_slice(key).get_shape()) != tuple(tensor.shape):
            return None
        found[name] = held[key], key
    return StoredWeights(found, dtype) if held.keys() <= state.keys() else None
