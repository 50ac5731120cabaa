"""Formula for the memory of one training process.

The formula counts the bytes of all tensors when `TurnTrainer` trains a decoder such as Llama or Qwen with AdamW. Its
error on measured cases is in docs/how-to/estimate.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from perturn.table import locate

_EXACT = 4
"""Bytes of a float32 number, the data type of trained weights, gradients and the residual stream."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model that determine its memory."""

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    mlp: int
    """Number of features inside a feed-forward block."""
    query: int
    """Number of features of all query heads together."""
    key: int
    """Number of features of all key heads together, equal to the number for all value heads."""
    heads: int
    tied: bool
    """Whether input and output embeddings are tied."""

    @property
    def embedding(self) -> int:
        """Number of parameters of the input embedding, and also of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Number of parameters of one layer."""
        return (self.parameters - self.embedding * (1 if self.tied else 2)) // self.layers

    @property
    def multiplied(self) -> int:
        """Number of parameters in matrix products: all except an untied input embedding."""
        return self.parameters - (0 if self.tied else self.embedding)

    def adapters(self, rank: int) -> int:
        """Return the number of parameters of adapters at every linear layer except the output layer."""
        attention = 3 * self.hidden + 2 * self.query + 2 * self.key + self.hidden
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp))


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a training process needs on its device, by part. Not all parts are held at the same time."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    """Copies of the weights in autocast's data type."""
    activations: float
    logits: float
    """Tiles of logits, and the gradient of the output layer."""
    gathered: float
    """Layers gathered from all processes, or gradients that are exchanged."""
    start: float
    """Bytes held before the first step: the whole model as loaded, and the reference's pass, if the loss reads one."""
    peak: float
    """Largest number of bytes held at any time."""
    host: float
    """Bytes of main memory that the process needs, if its device is a GPU; else 0."""

    def to_dict(self) -> dict[str, float]:
        """Return all fields by name, in bytes."""
        return asdict(self)


def model_shape(model: Any) -> ModelShape:
    """Return the sizes of a transformers model, which may have no weights."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    features = getattr(text, "head_dim", None) or text.hidden_size // heads
    read, written = model.get_input_embeddings(), model.get_output_embeddings()
    return ModelShape(
        parameters=sum(each.numel() for each in model.parameters()),
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        mlp=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        query=heads * features,
        key=(getattr(text, "num_key_value_heads", None) or heads) * features,
        heads=heads,
        tied=written is None or written.weight is read.weight,
    )


def training_memory(
    shape: ModelShape,
    *,
    tokens: int,
    loss_tokens: int | None = None,
    compute_bytes: int = 2,
    device: str = "cuda",
    adapters: int = 0,
    checkpointing: bool = False,
    processes: int = 1,
    sharding: Literal["none", "fsdp2"] = "none",
    cpu_offload: bool = False,
    passes: int = 2,
    reads_reference: bool = True,
    second_reference: bool = False,
) -> TrainingMemory:
    """Return the memory that one process of a training needs.

    Args:
        shape: Sizes of the model.
        tokens: Number of tokens in a pass: the token budget, or the tokens of an optimizer step if they are fewer.
        loss_tokens: Number of these tokens that carry loss; None: all.
        compute_bytes: Bytes of a number in the data type of the computation: 2 for bfloat16, 4 for float32.
        device: `cpu` or `cuda`.
        adapters: Number of parameters of trained adapters; 0: all weights are trained.
        checkpointing: Whether activation checkpointing is on.
        processes: Number of processes that train together.
        sharding: The setting `launch.sharding`.
        cpu_offload: The setting `launch.cpu_offload`.
        passes: Number of passes in an optimizer step. From the second on, gradients and activations are held together.
        reads_reference: Whether loss or credit reads a reference, which is computed before training.
        second_reference: Whether the reference differs from the model with which training starts.
    """
    divided, full = sharding == "fsdp2", not adapters
    share, trained = processes if divided else 1, adapters or shape.parameters
    frozen_bytes = 2 if divided else _EXACT
    whole = (_EXACT if not adapters else frozen_bytes) * shape.parameters + _EXACT * adapters
    weights, gradients, optimizer = whole / share, _EXACT * trained / share, 2 * _EXACT * trained / share
    loss = tokens if loss_tokens is None else min(loss_tokens, tokens)
    activations = _activation_bytes(shape, compute_bytes, full, checkpointing, tokens, loss)
    logits = _logit_bytes(shape, loss, compute_bytes, device, full)
    copies = _copied_bytes(shape, compute_bytes, adapters, checkpointing, divided)
    exchanged = _EXACT * trained if processes > 1 else 0
    gathered = _gathered_bytes(shape, frozen_bytes if adapters else _EXACT, full) if divided else exchanged
    begins = copies + activations + logits + (gradients if passes > 1 else 0.0)
    ends = gradients + (2 if shape.tied else 1) * _EXACT * shape.embedding * full
    peak = weights + optimizer + gathered + max(begins, ends)
    held = whole if divided else _EXACT * shape.parameters
    loaded = _EXACT * shape.parameters + (frozen_bytes * shape.parameters if divided and adapters else 0)
    start = loaded if device == "cpu" else 0.0 if divided else held
    if reads_reference:
        start = max(start, held * (2 if second_reference and device == "cpu" else 1))
        start += _reading_bytes(shape, compute_bytes, device, tokens, loss, frozen=divided and not full)
    host: float = loaded + second_reference * _EXACT * shape.parameters
    if cpu_offload:
        host = max(host, weights + gradients + optimizer)
        peak -= weights + optimizer + gradients * (passes > 1 or ends > begins)
        weights = gradients = optimizer = 0.0
    parts = weights, gradients, optimizer, copies, activations, logits, gathered
    return TrainingMemory(*parts, start, max(peak, start), host * (device != "cpu"))


def cache_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """Return the bytes of one token in an engine's KV cache, over all layers."""
    return 2 * shape.layers * shape.key * compute_bytes


def _layer_bytes(shape: ModelShape, compute: int, full: bool) -> float:
    """Return the bytes per token that a layer stores for the backward pass.

    Each norm stores its input and, if its weight is trained, the normed input. In bfloat16, each linear layer stores a
    copy of its input; in float32, layers with the same input share it.
    """
    norms = 2 * (2 if full else 1) * _EXACT * shape.hidden
    copies = (3 + 2) * compute if compute < _EXACT else 2 * compute
    attention = compute * (2 * shape.query + 2 * shape.key) + _EXACT * shape.heads
    return norms + copies * shape.hidden + attention + 4 * compute * shape.mlp


def _activation_bytes(
    shape: ModelShape, compute: int, full: bool, checkpointing: bool, tokens: int, rows: int
) -> float:
    """Return the bytes of activations stored for the backward pass; the last layer stores only `rows` loss tokens."""
    layer, ends = _layer_bytes(shape, compute, full), _EXACT * shape.hidden * (2 if full else 1)
    if checkpointing:
        return tokens * (shape.layers * _checkpoint_bytes(shape, compute) + layer + ends)
    return tokens * ((shape.layers - 1) * layer + ends) + rows * layer


def _checkpoint_bytes(shape: ModelShape, compute: int) -> float:
    """Return the bytes per token that a checkpointed layer stores: its input, and the output of attention."""
    return _EXACT * shape.hidden + compute * shape.query + _EXACT * shape.heads


def _logit_bytes(shape: ModelShape, rows: int, compute: int, device: str, full: bool) -> float:
    """Return the bytes of the output layer's forward and backward pass for a number of rows."""
    name = "CACHED_BYTES" if device == "cpu" else "TILE_BYTES"
    size, least, most = (
        int(locate(f"perturn.policy.head:{each}")) for each in (name, "LEAST_WORDS", "KEPT_BYTES")
    )
    tile = min(max(least * _EXACT * rows, size), _EXACT * rows * shape.vocabulary)
    kept = min(most, compute * rows * shape.vocabulary)
    states = rows * shape.hidden * (2 * _EXACT + (compute if compute < _EXACT else 0))
    weight = full * shape.embedding * (_EXACT + (compute if compute < _EXACT else 0))
    return kept + tile * (1 + compute / _EXACT) + states + weight


def _reading_bytes(
    shape: ModelShape, compute: int, device: str, tokens: int, rows: int, *, frozen: bool
) -> float:
    """Return the bytes of a pass without gradients, weights excluded.

    Args:
        shape: Sizes of the model.
        compute: Bytes of a number in the data type of the computation.
        device: `cpu` or `cuda`.
        tokens: Number of tokens in the pass.
        rows: Number of these tokens that carry loss.
        frozen: Whether the weights have the data type of the computation, so that autocast makes no copies.
    """
    copies = 0.0 if frozen else _copied_bytes(shape, compute, 0, False, False)
    states = 2 * tokens * _layer_bytes(shape, compute, full=True)
    return copies + states + _logit_bytes(shape, rows, compute, device, full=False)


def _copied_bytes(
    shape: ModelShape, compute: int, adapters: int, checkpointing: bool, divided: bool
) -> float:
    """Return the bytes of autocast's bfloat16 copies of float32 weights.

    autocast keeps the copies of trained weights until the forward pass ends, and the backward pass needs them too.
    """
    if compute == _EXACT:
        return 0.0
    if not adapters:
        return compute * shape.multiplied
    frozen = 0 if divided else shape.embedding if checkpointing else shape.multiplied
    return compute * (adapters + frozen)


def _gathered_bytes(shape: ModelShape, weight: int, full: bool) -> float:
    """Return the bytes that FSDP2 gathers: input and output layer for a whole pass, and three layers at a time."""
    ends = shape.embedding * (1 if shape.tied else 2)
    return weight * (ends + 3 * shape.layer) + full * _EXACT * 2 * shape.layer
