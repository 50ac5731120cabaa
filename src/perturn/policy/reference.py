"""Reference log-probabilities and the weight of each turn: all that is computed of a row before training.

The reference is computed once, without gradient. The result is kept on disk under a hash of all its inputs. Weights are
written here and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.config.sections import TOKEN_BUDGET
from perturn.credit import ClipCredit, Credit
from perturn.data.cache_folders import evict, reference_bytes, remove_abandoned
from perturn.errors import ConfigError, DataError, check_provided
from perturn.io.atomic_write import replacing
from perturn.losses import Loss, TurnLogprobs
from perturn.losses.protocol import CoupledLoss
from perturn.needs import Distance, Reference, keywords, reads
from perturn.policy.examples import Example
from perturn.policy.logprobs import Track, action_logprobs, exact_length, pack_by_pack
from perturn.policy.models import config_digest, load_model, tensors_digest, weights_digest
from perturn.remaining import remaining_of
from perturn.types import Trajectory

_logger = logging.getLogger(__name__)

Precision = Callable[[], AbstractContextManager[Any]]
"""Makes a context that sets the precision, such as autocast."""

_PROBE = 256
"""Tokens whose log-probabilities tell one reference from another."""


def reference_identity(model: Any, precision: Precision = nullcontext) -> str:
    """Return the hash of all that decides a policy's log-probabilities: equal identities are equal references.

    Its outputs for a few fixed tokens show differences that no list of settings would: adapters, hooks, kernels.
    The key also has weights, buffers and settings, which may only matter for other tokens, and versions.

    Args:
        model: The reference, on the device to compute on; it is prepared for packed sequences.
        precision: That it will run in.
    """
    probe = probe_logprobs(model, precision)
    with frozen(model, precision):
        device = model.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    parts = [
        *(sys.modules["perturn"].__version__, torch.__version__, transformers.__version__),
        *(device, str(model.dtype), str(autocast)),
        tensors_digest({"probe": probe, **dict(model.named_buffers())}),
        *(weights_digest(model), config_digest(model), _settings(model)),
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def probe_logprobs(model: Any, precision: Precision = nullcontext) -> Tensor:
    """Return log-probabilities of a few fixed tokens under a policy, which tell one policy from another.

    Returns:
        Log-probabilities, in nats, float32 on the CPU [tokens].
    """
    with frozen(model, precision):
        (probe,) = compute_logprobs(model, [_probe(model)])
    return probe


def reference_logprobs(
    model: Any,
    sequences: Sequence[Encoded],
    *,
    folder: Path,
    identity: str,
    token_budget: int = TOKEN_BUDGET,
    precision: Precision = nullcontext,
    track: Track = iter,
) -> list[Tensor]:
    """Return log-probabilities of every sequence's loss tokens under a frozen policy.

    Args:
        model: The reference, on the device to compute on.
        sequences: Trajectories as tokens.
        folder: Where results are kept; a second call with the same content reads them back. Files that are damaged are
            made again, and those used longest ago go where all take more than
            `perturn.data.cache_folders.reference_bytes`.
        identity: From `reference_identity`.
        token_budget: Tokens of one pass.
        precision: That it is to run in, as the identity was made.
        track: Wraps the work to show progress.

    Returns:
        One tensor per sequence, in nats, float32 on the CPU [loss tokens].
    """
    file = folder / f"{_content_hash(sequences, identity)}.reference.safetensors"
    stored = _read(file)
    if stored is not None:
        return stored
    most = reference_bytes()
    with frozen(model, precision):
        logprobs = compute_logprobs(model, sequences, token_budget, track)
    _save(file, logprobs)
    evict(folder, "*.reference.safetensors", most, keep=file)
    remove_abandoned(folder, ".*.reference.safetensors.*.partial")
    return _read(file) or logprobs  # from the file they need no memory


def compute_logprobs(
    model: Any, sequences: Sequence[Encoded], token_budget: int = TOKEN_BUDGET, track: Track = iter
) -> list[Tensor]:
    """Return log-probabilities of every sequence's loss tokens, computed pack by pack.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Trajectories as tokens.
        token_budget: Tokens of one pass.
        track: Wraps the work to show progress.

    Returns:
        One tensor per sequence, in nats, float32 on the CPU [loss tokens].
    """
    return pack_by_pack(action_logprobs, model, sequences, token_budget, track)


@contextmanager
def frozen(model: Any, precision: Precision = nullcontext) -> Iterator[None]:
    """Run the model without gradient and dropout inside this block, in a precision."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision():
            yield
    finally:
        model.train(was_training)


def _probe(model: Any) -> Encoded:
    """Return tokens from all of the vocabulary, as many as the model computes."""
    size = min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    length = min(_PROBE, exact_length(model) or _PROBE)
    ids = (torch.arange(length) * 7919 % size).tolist()
    return Encoded(tuple(ids), (NO_TURN, *(0,) * (length - 1)), ("user",) * length)


def _settings(model: torch.nn.Module) -> str:
    """Return the plain attributes of all layers, such as scales and switches; the model's own are in its config."""
    found = {
        name: {
            key: value
            for key, value in vars(layer).items()
            if key not in ("training", "_is_hf_initialized")
            and not key.startswith("perturn_")
            and _is_plain(value)
        }
        for name, layer in model.named_modules()
        if not isinstance(layer, transformers.PreTrainedModel)
    }
    return json.dumps(found, sort_keys=True, default=lambda words: sorted(words, key=repr))


def _is_plain(value: object) -> bool:
    """Return whether a value is made of numbers and words alone."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _save(file: Path, logprobs: list[Tensor]) -> None:
    """Write the file whole or not at all, with a hash of its content."""
    lengths = torch.tensor([len(each) for each in logprobs])
    held = {"logprobs": torch.cat(logprobs), "lengths": lengths}
    with replacing(file, foreign=(SafetensorError,)) as fresh:
        save_file(held, fresh, metadata={"check": _check(file, held)})


def _check(file: Path, held: dict[str, Tensor]) -> str:
    """Return the metadata of a file of that name and content."""
    return f"{file.name} {tensors_digest(held)}"


def _read(file: Path) -> list[Tensor] | None:
    """Return contents of the file, memory-mapped; None if there is none, or if it is damaged, which is logged."""
    try:
        with safe_open(file, "pt") as opened:
            said = opened.metadata()
        held = load_file(file)
        damaged = said != {"check": _check(file, held)}
        why = "its content has another hash than was written"
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, ValueError) as error:
        damaged, why = True, f"{type(error).__name__}: {error}"
    if damaged:
        _logger.warning("%s is damaged (%s); the reference is computed again.", file, why)
        return None
    with suppress(OSError):  # evicted by now, or in a cache that others keep and we only read
        os.utime(file)
    return list(held["logprobs"].split(held["lengths"].tolist()))


def _content_hash(sequences: Sequence[Encoded], identity: str) -> str:
    """Return the hash of everything the result depends on; the ids determine both the text and the tokenizer."""
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    for one in sequences:
        lengths = len(one.ids), len(one.starts)
        digest.update(torch.tensor([*lengths, *one.ids, *one.turn, *one.starts]).numpy().tobytes())
    return digest.hexdigest()


def weigh(example: Example, credit: Credit) -> Example:
    """Return the example with the weight of each turn, for losses, records and the report.

    It has its reference, where the credit needs one; each side is a separate group. A credit that reads the remaining
    path, and nothing of the reference, sees turns without loss too: an error among them is the first one all the same.

    Raises:
        ConfigError: If the credit gives anything but one finite number per turn, which would weigh turns of
            others.
    """
    weight: list[Tensor] = []
    for index, trajectory in enumerate(example.trajectories):
        if reads(credit.needs, Reference):
            given: dict[str, Any] = {Reference.name: [turn_logprobs(example, index)]}
            if reads(credit.needs, Distance):
                given[Distance.name] = [remaining_of(trajectory)]
            weight += asked(credit, [trajectory], **given)
        elif reads(credit.needs, Distance):
            kept, whole = sorted(set(example.sides[index].loss_turns)), example.whole[index]
            weight += [each[kept] for each in asked(credit, [whole], distance=[remaining_of(whole)])]
        else:
            weight += asked(credit, [trajectory])
    return replace(example, weight=tuple(weight))


def asked(credit: Credit, group: Sequence[Trajectory], **needed: Any) -> list[Tensor]:
    """Return weights of a group as a credit gives them, one tensor per trajectory [turns]; without gradient.

    Raises:
        ConfigError: If an input is missing, or it gives anything but one finite number per turn.
    """
    name, reads = f"credit {type(credit).__name__}", sorted(keywords(credit.needs))
    remedy = "give rows with weights, which rows.name=groups in a recipe computes before it trains"
    check_provided(name, reads, needed, "training", remedy)
    found = credit(group, **needed)
    _check_numbers(found, group, f"{name} must return", "a finite floating-point number")
    return [weight.detach() for weight in found]


def asked_clips(credit: Credit, group: Sequence[Trajectory], **needed: Any) -> list[Tensor | None]:
    """Return a credit's factors on clip ranges, with the same inputs as its weights [turns]; None if it gives none.

    Raises:
        ConfigError: If it gives anything but one finite number > 0 a turn.
    """
    found = cast(ClipCredit, credit).clips(group, **needed) if credit.traits.sets_clip else None
    if found is None:
        return [None] * len(group)
    whose = f"clips of credit {type(credit).__name__} must return"
    _check_numbers(found, group, whose, "a finite floating-point number > 0", above=0.0)
    return [factor.detach() for factor in found]


def _check_numbers(
    found: Any, group: Sequence[Trajectory], whose: str, number: str, above: float = -math.inf
) -> None:
    fits = isinstance(found, list | tuple) and len(found) == len(group)
    for index, trajectory in enumerate(group):
        if not (fits and _are_numbers(found[index], len(trajectory.turns), above)):
            raise ConfigError(
                f"{whose} one tensor per trajectory, with {number} for each of its turns; for the "
                f"{len(trajectory.turns)} turns of task {trajectory.task.id!r:.80} it returned "
                f"{found[index] if fits and len(group) > 1 else found!r:.200}."
            )


def _are_numbers(found: Any, turns: int, above: float) -> bool:
    """Return whether it is one finite floating-point number above a bound a turn."""
    if not (isinstance(found, Tensor) and found.is_floating_point() and found.shape == (turns,)):
        return False
    return bool((found.isfinite() & (found > above)).all())


def weigh_all(examples: Sequence[Example], loss: Loss, credit: Credit) -> list[Example]:
    """Return the examples with their weights, and with the loss's inputs of all pairs of an optimizer step.

    Existing weights of examples are kept.

    Raises:
        ConfigError: If the credit's weights are none.
    """
    weighed = [example if example.weight else weigh(example, credit) for example in examples]
    if not loss.traits.step_statistic:
        return weighed
    weight = [example.weight[0] for example in weighed]
    if weighed[0].reference:
        reference = [turn_logprobs(example, 0) for example in weighed]
        chosen = TurnLogprobs.from_nested(reference, reference, weight)
    else:  # a statistic of counts and weights
        nothing = [_by_turn(one, 0, torch.zeros(len(one.chosen.loss_turns))) for one in weighed]
        chosen = TurnLogprobs.from_nested(nothing, weight=weight)
    has_spread = torch.tensor([example.has_spread for example in weighed])
    inputs = {name: torch.cat([each.inputs[name][0] for each in weighed]) for name in weighed[0].inputs}
    chosen = replace(chosen, has_spread=has_spread, inputs=inputs)
    statistics = cast(CoupledLoss, loss).step_statistic(chosen).tolist()
    return [replace(one, statistic=found) for one, found in zip(weighed, statistics, strict=True)]


def turn_logprobs(example: Example, side: int) -> list[Tensor]:
    """Return reference log-probabilities of one side, in nats; one tensor for each turn that carries loss [tokens]."""
    return _by_turn(example, side, example.reference[side])


def _by_turn(example: Example, side: int, values: Tensor) -> list[Tensor]:
    """Return values of the loss tokens of one side, one tensor per turn [tokens]."""
    carried = torch.tensor(example.sides[side].loss_turns)
    return list(values.split(carried.unique_consecutive(return_counts=True)[1].tolist()))


def turn_weights(
    model_name: str, examples: Sequence[Example], credit: Credit | None
) -> Iterator[list[dict[int, tuple[float, float]]]]:
    """Yield (confidence, weight) by turn for each side of each row, to be shown, computed as training computes them.

    Existing weights of a row are kept, and need no credit. The reference policy is loaded if there is a row.
    """
    model = load_model(model_name) if examples else None
    return (_side_weights(model, example, credit) for example in examples)


def _side_weights(
    model: Any, example: Example, credit: Credit | None
) -> list[dict[int, tuple[float, float]]]:
    known, largest = model.get_input_embeddings().num_embeddings, max(max(side.ids) for side in example.sides)
    if largest >= known:
        raise DataError(
            f"token id {largest} is none of the model, which knows {known}; name the model that sampled the rows."
        )
    with torch.no_grad():
        example = replace(example, reference=tuple(compute_logprobs(model, example.sides)))
    found = []
    if not example.weight:
        assert credit is not None
        example = weigh(example, credit)
    for index, (side, weight) in enumerate(zip(example.sides, example.weight, strict=True)):
        confidence = [float(turn.mean().exp()) for turn in turn_logprobs(example, index)]
        both = zip(confidence, weight.tolist(), strict=True)
        found.append(dict(zip(sorted(set(side.loss_turns)), both, strict=True)))
    return found
