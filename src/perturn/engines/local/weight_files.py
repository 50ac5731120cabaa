"""The weights of a model's folder, with adapters or without, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from perturn.engines.adapter_files import WEIGHTS, low_rank
from perturn.errors import ModelError

_BEFORE, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""Parts of the names of tensors in a file of peft."""
_Product = tuple[Tensor, Tensor, float]
"""Two matrices and a number; the product of the three is added to a weight."""


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a folder, by the names of the model's state; each tensor is read when it is asked for."""

    def __init__(
        self, found: Mapping[str, tuple[Any, str]], dtype: torch.dtype, added: Mapping[str, _Product]
    ) -> None:
        """Only `stored_weights` makes one: of each name, the open file, the name in it, and what is added to it."""
        self._stored, self._dtype, self._added = found, dtype, added

    def __getitem__(self, name: str) -> Tensor:
        file, key = self._stored[name]
        tensor: Tensor = file.get_tensor(key)
        if name in self._added:
            up, down, scale = self._added[name]
            tensor = tensor.float() + (up @ down) * scale
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def adapted(self) -> Collection[str]:
        """Names of the weights that adapters change."""
        return self._added.keys()


def take_weights(model: Any, folder: str | Path, stored: StoredWeights | None) -> None:
    """Give a model the weights of a folder, which `stored_weights` has found or only transformers can read."""
    if stored is None:
        model.load_state_dict(type(model).from_pretrained(folder, dtype=model.dtype).state_dict())
        return
    copy_weights(model, stored, stored)


def copy_weights(model: Any, stored: StoredWeights, names: Collection[str]) -> None:
    """Give a model some of the weights that are stored."""
    state = model.state_dict()
    with torch.no_grad():
        for name in names:
            state[name].copy_(stored[name])


def stored_weights(
    folder: str | Path, model: Any, dtype: torch.dtype, base: str | Path | None = None
) -> StoredWeights | None:
    """Return the weights of a folder as a model's state, in a type to compute in.

    Args:
        folder: What `save_pretrained` wrote.
        model: A model of the same architecture; it may have no weights. Tensors that it ties are stored once.
        dtype: Of the weights.
        base: Folder of the model that the folder's adapters are added to; None: the folder holds a whole model.

    Returns:
        None if the files have other names or shapes than the model, which transformers alone can translate, or if the
        adapters are of a kind that peft alone can add.
    """
    read: Any = safe_open
    files = [read(file, framework="pt") for file in sorted(Path(base or folder).glob("model*.safetensors"))]
    held = {name: file for file in files for name in file.keys()}  # noqa: SIM118  it is no mapping
    state = model.state_dict(keep_vars=True)
    stored = {id(tensor): name for name, tensor in state.items() if name in held}
    found = {}
    for name, tensor in state.items():
        key = name if name in held else stored.get(id(tensor))
        if key is None or tuple(held[key].get_slice(key).get_shape()) != tuple(tensor.shape):
            return None
        found[name] = held[key], key
    added = {} if base is None else _products(Path(folder), state)
    return StoredWeights(found, dtype, added) if added is not None and held.keys() <= state.keys() else None


def _products(folder: Path, state: Mapping[str, Tensor]) -> dict[str, _Product] | None:
    """Return what adapters add to each weight, by its name; None if one is not a product of two matrices."""
    try:
        how, tensors = low_rank(folder), load_file(folder / WEIGHTS)
    except Exception as error:  # damaged files make errors of many types
        raise ModelError(
            f"the adapters in {folder} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if how is None:
        return None
    added = {}
    for name in [name for name in tensors if name.endswith(_DOWN)]:
        down, up = tensors.pop(name), tensors.pop(name.removesuffix(_DOWN) + _UP, None)
        weight = name.removeprefix(_BEFORE).removesuffix(_DOWN) + ".weight"
        if up is None or weight not in state or state[weight].shape != (len(up), down.shape[1]):
            return None
        added[weight] = up.float(), down.float(), how.scale
    return None if tensors else added
