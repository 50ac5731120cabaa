"""Reading of a model folder's weights, with or without adapters, one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from perturn.engines.lora_files import WEIGHTS, low_rank
from perturn.errors import ModelError

_BEFORE, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""Parts of tensor names in a weights file of peft."""
_Product = tuple[Tensor, Tensor, float]
"""An adapter of one weight: up [outputs, rank], down [rank, inputs] and scale. scale * up @ down is added."""


class StoredWeights(Mapping[str, Tensor]):
    """Weights of a folder by their names in the model's state dict; each tensor is read on access."""

    def __init__(
        self, found: Mapping[str, tuple[Any, str]], dtype: torch.dtype, added: Mapping[str, _Product]
    ) -> None:
        """Make a mapping; call `stored_weights` instead.

        Args:
            found: For each name, the open file and the tensor's name in this file.
            dtype: Data type of the returned floating-point tensors.
            added: Adapters by the name of the weight that they change.
        """
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
    """Load the weights of a folder into a model.

    Args:
        model: Model with weights; they are overwritten.
        folder: Folder that `save_pretrained` wrote.
        stored: Result of `stored_weights` for this folder; None: transformers reads the folder.
    """
    if stored is None:
        model.load_state_dict(type(model).from_pretrained(folder, dtype=model.dtype).state_dict())
        return
    copy_weights(model, stored, stored)


def copy_weights(model: Any, stored: StoredWeights, names: Collection[str]) -> None:
    """Copy the named weights into a model."""
    state = model.state_dict()
    with torch.no_grad():
        for name in names:
            state[name].copy_(stored[name])


def check_merge(model: Any, folder: Path) -> None:
    """Reject adapters on a tied layer: merged into its weight, they would also change the other layer.

    Raises:
        ModelError: If adapters of the folder change the input or the output embeddings, which are one tensor.
    """
    read, written = model.get_input_embeddings(), model.get_output_embeddings()
    if written is None or written.weight is not read.weight or not (folder / WEIGHTS).is_file():
        return
    held: Any = safe_open(folder / WEIGHTS, framework="pt")
    for name in (name for name, each in model.named_modules() if each is read or each is written):
        if any(f".{name}.lora_" in key for key in held.keys()):  # noqa: SIM118  the file object is no mapping
            raise ModelError(
                f"the adapters in {folder} change {name}, which shares its weight with the other embeddings, so they "
                "cannot be merged; save the merged model with tie_word_embeddings=False, and name its folder."
            )


def stored_weights(
    folder: str | Path, model: Any, dtype: torch.dtype, base: str | Path | None = None
) -> StoredWeights | None:
    """Return the weights of a folder under the names of a model's state dict.

    Args:
        folder: Folder that `save_pretrained` wrote.
        model: Model of the same architecture; it may have no weights. Its tied tensors are stored once.
        dtype: Data type of the returned weights.
        base: Folder of the base model, if `folder` holds only adapters; None: `folder` holds a whole model.

    Returns:
        The weights. None if names or shapes in the files differ from the model's, so that only transformers can
        convert them. None also if the adapters are no plain LoRA, so that only peft can add them.
    """
    read: Any = safe_open
    files = [read(file, framework="pt") for file in sorted(Path(base or folder).glob("model*.safetensors"))]
    held = {name: file for file in files for name in file.keys()}  # noqa: SIM118  the file object is no mapping
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
    """Return the adapters of a folder by the name of the weight that they change; None if they are not plain LoRA.

    Args:
        folder: Adapter folder in the format of peft.
        state: State dict of the model, for names and shapes.

    Raises:
        ModelError: If the files cannot be read.
    """
    try:
        how, tensors = low_rank(folder), load_file(folder / WEIGHTS)
    except Exception as error:  # damaged files raise errors of many types
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
