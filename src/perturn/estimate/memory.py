"""Memory of one training process by formula: tensors of the model, and the memory of its passes.

The formula counts the bytes of tensors of a decoder such as Llama's or Qwen's, trained by `TurnTrainer` with AdamW. Its
error on measured cases is in docs/how-to/estimate.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from perturn.table import locate

_EXACT = 4
"""Bytes of a float32 number: weights that train, gradients, and the residual stream."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model that decide how much memory it takes."""

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    mlp: int
    """Features within a feed-forward block."""
    query: int
    """Features of all query heads together."""
    key: int
    """Features of all key heads together, and of all value heads."""
    heads: int
    tied: bool
    """Whether input and output layer are one."""

    @property
    def embedding(self) -> int:
        """Parameters of the input layer, and of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return (self.parameters - self.embedding * (1 if self.tied else 2)) // self.layers

    @property
    def multiplied(self) -> int:
        """Parameters of the matrices that are multiplied with: all but the input layer, unless it is both."""
        return self.parameters - (0 if self.tied else self.embedding)

    def adapters(self, rank: int) -> int:
        """Parameters of adapters of a rank at each linear layer but the output layer."""
        attention = 3 * self.hidden + 2 * self.query + 2 * self.key + self.hidden
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp))


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a training process needs on its device, by part, and `peak`, which is less than their sum."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    """Weights in the type that is computed in, which autocast makes."""
    activations: float
    logits: float
    """Tiles of logits, and the gradient of the output layer."""
    gathered: float
    """Layers that are gathered from all processes, or gradients that are exchanged."""
    start: float
    """Before the first step: the whole model as loaded, and a pass without gradients where a reference is read."""
    peak: float
    """The most at a time."""
    host: float
    """Bytes that the process needs in the memory of the machine, where its device is a GPU."""

    def to_dict(self) -> dict[str, float]:
        """Return the parts by name."""
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
        shape: Of the model.
        tokens: That pass together: the token budget, or less if a step has fewer.
        loss_tokens: Of these, tokens that carry loss; None: all.
        compute_bytes: Of a number in the type that is computed in: 2 for bfloat16, 4 for float32.
        device: cpu or cuda.
        adapters: Parameters of adapters that are trained instead of all weights; see `ModelShape.adapters`.
        checkpointing: Whether activations are computed again in the backward pass.
        processes: That train together.
        sharding: As `launch.sharding` has it.
        cpu_offload: As `launch.cpu_offload` has it.
        passes: Of an optimizer step. From the second one on, all activations and the gradients are held at the same
            time.
        reads_reference: Whether the loss, or the credit, reads a reference, which is computed before training.
        second_reference: Whether the reference is another model than the start of training.
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
    """Return the bytes of one token's keys and values in all layers, as an engine keeps them."""
    return 2 * shape.layers * shape.key * compute_bytes


def _layer_bytes(shape: ModelShape, compute: int, full: bool) -> float:
    """Bytes that a layer keeps of a token for the backward pass.

    Each norm keeps its input and, if its weight is trained, the normed input. Linear layers that compute in bfloat16
    each keep a copy of their input; in float32 they share one.
    """
    norms = 2 * (2 if full else 1) * _EXACT * shape.hidden
    copies = (3 + 2) * compute if compute < _EXACT else 2 * compute
    attention = compute * (2 * shape.query + 2 * shape.key) + _EXACT * shape.heads
    return norms + copies * shape.hidden + attention + 4 * compute * shape.mlp


def _activation_bytes(
    shape: ModelShape, compute: int, full: bool, checkpointing: bool, tokens: int, rows: int
) -> float:
    """Bytes that a pass keeps for the backward pass: of the last layer, only rows that carry loss."""
    layer, ends = _layer_bytes(shape, compute, full), _EXACT * shape.hidden * (2 if full else 1)
    if checkpointing:
        return tokens * (shape.layers * _checkpoint_bytes(shape, compute) + layer + ends)
    return tokens * ((shape.layers - 1) * layer + ends) + rows * layer


def _checkpoint_bytes(shape: ModelShape, compute: int) -> float:
    """Bytes that a checkpointed layer keeps of a token: its input, and the result of attention."""
    return _EXACT * shape.hidden + compute * shape.query + _EXACT * shape.heads


def _logit_bytes(shape: ModelShape, rows: int, compute: int, device: str, full: bool) -> float:
    """Bytes of the output layer's forward and backward pass for a number of rows."""
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
    """Bytes of a pass without gradients, without the weights.

    Args:
        shape: Of the model.
        compute: Bytes of a number in the type that is computed in.
        device: cpu or cuda.
        tokens: Of the pass.
        rows: Of these, tokens that carry loss.
        frozen: Whether the weights are in that type, so that autocast copies none.
    """
    copies = 0.0 if frozen else _copied_bytes(shape, compute, 0, False, False)
    states = 2 * tokens * _layer_bytes(shape, compute, full=True)
    return copies + states + _logit_bytes(shape, rows, compute, device, full=False)


def _copied_bytes(
    shape: ModelShape, compute: int, adapters: int, checkpointing: bool, divided: bool
) -> float:
    """Bytes of weights in bfloat16, in addition to float32 weights.

    autocast keeps copies of weights that are trained until a forward pass ends, and the backward pass needs them.
    """
    if compute == _EXACT:
        return 0.0
    if not adapters:
        return compute * shape.multiplied
    frozen = 0 if divided else shape.embedding if checkpointing else shape.multiplied
    return compute * (adapters + frozen)


def _gathered_bytes(shape: ModelShape, weight: int, full: bool) -> float:
    """Bytes of gathered weights with FSDP2: the input and output layer for a whole pass, and layers for a moment."""
    ends = shape.embedding * (1 if shape.tied else 2)
    return weight * (ends + 3 * shape.layer) + full * _EXACT * 2 * shape.layer
