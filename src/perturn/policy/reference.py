"""Computation of reference log-probabilities and turn weights, before training starts.

Reference log-probabilities are computed once, without gradient, and cached on disk under a hash of all inputs. No other
module sets the weight of a turn.
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
"""Function that returns a context manager for the precision, such as autocast."""

_PROBE = 256
"""Number of tokens in the test sequence whose log-probabilities enter a reference's identity."""


def reference_identity(model: Any, precision: Precision = nullcontext) -> str:
    """Return a hash of everything that determines a policy's log-probabilities.

    The hash includes the log-probabilities of a fixed test sequence. They reveal differences that no list of settings
    contains, such as adapters, hooks and kernels. It also includes weights, buffers, settings and library versions,
    whose differences may only affect other tokens.

    Args:
        model: The reference, on the device of the computation; it is prepared for packed sequences.
        precision: Precision of the later computation.
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
    """Return the log-probabilities of a fixed test sequence, by which different policies can be told apart.

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
    """Return log-probabilities of every sequence's loss tokens under a frozen policy, from the cache if possible.

    Args:
        model: The reference, on the device of the computation.
        sequences: Trajectories as tokens.
        folder: Folder of the cache. A damaged file is computed again. If all files together exceed
            `perturn.data.cache_folders.reference_bytes`, the least recently used files are deleted.
        identity: Result of `reference_identity`.
        token_budget: Largest number of tokens in one forward pass.
        precision: Precision of the computation, the same as for the identity.
        track: Function that wraps the list of packs to show progress.

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
    return _read(file) or logprobs  # the file is memory-mapped


def compute_logprobs(
    model: Any, sequences: Sequence[Encoded], token_budget: int = TOKEN_BUDGET, track: Track = iter
) -> list[Tensor]:
    """Return log-probabilities of every sequence's loss tokens, computed pack by pack.

    Args:
        model: A causal language model on the device of the computation.
        sequences: Trajectories as tokens.
        token_budget: Largest number of tokens in one forward pass.
        track: Function that wraps the list of packs to show progress.

    Returns:
        One tensor per sequence, in nats, float32 on the CPU [loss tokens].
    """
    return pack_by_pack(action_logprobs, model, sequences, token_budget, track)


@contextmanager
def frozen(model: Any, precision: Precision = nullcontext) -> Iterator[None]:
    """Run the model without gradient and dropout inside this context, in the given precision."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision():
            yield
    finally:
        model.train(was_training)


def _probe(model: Any) -> Encoded:
    """Return a test sequence of tokens spread over the vocabulary, not longer than the model supports."""
    size = min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    length = min(_PROBE, exact_length(model) or _PROBE)
    ids = (torch.arange(length) * 7919 % size).tolist()
    return Encoded(tuple(ids), (NO_TURN, *(0,) * (length - 1)), ("user",) * length)


def _settings(model: torch.nn.Module) -> str:
    """Return the plain attributes of all layers as JSON, such as scales and switches.

    Attributes of the model itself are left out, since its config contains them.
    """
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
    """Return whether a value consists only of numbers, strings, None, and containers of these."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _save(file: Path, logprobs: list[Tensor]) -> None:
    """Write the file atomically, with a hash of its content."""
    lengths = torch.tensor([len(each) for each in logprobs])
    held = {"logprobs": torch.cat(logprobs), "lengths": lengths}
    with replacing(file, foreign=(SafetensorError,)) as fresh:
        save_file(held, fresh, metadata={"check": _check(file, held)})


def _check(file: Path, held: dict[str, Tensor]) -> str:
    """Return the metadata by which a reader detects damage: the file's name and a hash of its tensors."""
    return f"{file.name} {tensors_digest(held)}"


def _read(file: Path) -> list[Tensor] | None:
    """Return the memory-mapped content of a file; None if it is missing, or damaged, which is logged."""
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
    with suppress(OSError):  # the file was evicted, or the cache is read-only
        os.utime(file)
    return list(held["logprobs"].split(held["lengths"].tolist()))


def _content_hash(sequences: Sequence[Encoded], identity: str) -> str:
    """Return a hash of the sequences and the reference's identity, on which the result depends.

    Token ids stand for the text and the tokenizer.
    """
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    for one in sequences:
        lengths = len(one.ids), len(one.starts)
        digest.update(torch.tensor([*lengths, *one.ids, *one.turn, *one.starts]).numpy().tobytes())
    return digest.hexdigest()


def weigh(example: Example, credit: Credit) -> Example:
    """Return the example with the weight that a credit gives each turn that carries loss.

    A credit that reads the remaining path, but not the reference, also sees turns without loss: the first error of an
    episode may be among them.

    Args:
        example: A row, with reference log-probabilities if the credit reads them.
        credit: The credit; it gets each side of a pair as a group of its own.

    Raises:
        ConfigError: If the credit does not return one finite number per turn.
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
    """Ask a credit for the weights of a group, and check them.

    Args:
        credit: The credit.
        group: Trajectories of one group.
        needed: Inputs that the credit reads besides the trajectories, by name.

    Returns:
        One tensor of weights per trajectory, without gradient [turns].

    Raises:
        ConfigError: If an input is missing, or the credit does not return one finite number per turn.
    """
    name, reads = f"credit {type(credit).__name__}", sorted(keywords(credit.needs))
    remedy = "give rows with weights, which rows.name=groups in a recipe computes before it trains"
    check_provided(name, reads, needed, "training", remedy)
    found = credit(group, **needed)
    _check_numbers(found, group, f"{name} must return", "a finite floating-point number")
    return [weight.detach() for weight in found]


def asked_clips(credit: Credit, group: Sequence[Trajectory], **needed: Any) -> list[Tensor | None]:
    """Ask a credit for its factors on the clip range, and check them; arguments as in `asked`.

    Returns:
        One tensor of factors per trajectory [turns], or None for each trajectory if the credit sets no clip ranges.

    Raises:
        ConfigError: If the credit does not return one finite number > 0 per turn.
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
    """Return whether `found` is a tensor with one finite floating-point number above a bound for each turn."""
    if not (isinstance(found, Tensor) and found.is_floating_point() and found.shape == (turns,)):
        return False
    return bool((found.isfinite() & (found > above)).all())


def weigh_all(examples: Sequence[Example], loss: Loss, credit: Credit) -> list[Example]:
    """Return the examples of an optimizer step with turn weights, and with the loss's statistic over all examples.

    Examples that already have weights keep them.

    Raises:
        ConfigError: If the credit does not return one finite number per turn.
    """
    weighed = [example if example.weight else weigh(example, credit) for example in examples]
    if not loss.traits.step_statistic:
        return weighed
    weight = [example.weight[0] for example in weighed]
    if weighed[0].reference:
        reference = [turn_logprobs(example, 0) for example in weighed]
        chosen = TurnLogprobs.from_nested(reference, reference, weight)
    else:  # the statistic reads only weights and numbers of tokens
        nothing = [_by_turn(one, 0, torch.zeros(len(one.chosen.loss_turns))) for one in weighed]
        chosen = TurnLogprobs.from_nested(nothing, weight=weight)
    has_spread = torch.tensor([example.has_spread for example in weighed])
    inputs = {name: torch.cat([each.inputs[name][0] for each in weighed]) for name in weighed[0].inputs}
    chosen = replace(chosen, has_spread=has_spread, inputs=inputs)
    statistics = cast(CoupledLoss, loss).step_statistic(chosen).tolist()
    return [replace(one, statistic=found) for one, found in zip(weighed, statistics, strict=True)]


def turn_logprobs(example: Example, side: int) -> list[Tensor]:
    """Return the reference log-probabilities of one side, in nats, one tensor per turn that carries loss [tokens]."""
    return _by_turn(example, side, example.reference[side])


def _by_turn(example: Example, side: int, values: Tensor) -> list[Tensor]:
    """Split values of one side's loss tokens [loss tokens] into one tensor per turn [tokens]."""
    carried = torch.tensor(example.sides[side].loss_turns)
    return list(values.split(carried.unique_consecutive(return_counts=True)[1].tolist()))


def turn_weights(
    model_name: str, examples: Sequence[Example], credit: Credit | None
) -> Iterator[list[dict[int, tuple[float, float]]]]:
    """Yield confidence and weight of each turn, for each side of each row, computed as in training.

    The confidence of a turn is the geometric mean of its tokens' probabilities under the reference policy. Rows that
    already have weights keep them and need no credit.

    Args:
        model_name: Name of the reference policy; it is loaded only if there are rows.
        examples: The rows.
        credit: Credit for rows without weights; None if all rows have weights.

    Yields:
        For each row one mapping per side, from the index of a turn to (confidence, weight).
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
