"""`TurnTrainer` for a policy at a service: only log-probabilities, gradients and steps are delegated to the service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from sys import maxsize
from typing import Any

import torch
from torch import Tensor, nn

from perturn.backends.tinker.remote_policy import Asked, RemoteAdam, RemotePolicy, asked
from perturn.engines.tinker.stored_policy import stored_policy
from perturn.errors import DataError, ModelError
from perturn.policy.examples import Example
from perturn.policy.logprobs import Track
from perturn.policy.models import context_length, resuming
from perturn.policy.packing import Batch, Examples, by_budget, collate, mismatched_packs
from perturn.training.row_intake import sequences_of, with_logprobs
from perturn.training.turn_trainer import TurnTrainer

_ASKED = "asked"
"""Key of a pack for the sequences whose log-probabilities are requested from the service."""


def service_batch(examples: Sequence[Example | None]) -> dict[str, Any]:
    """Collate examples into one pack, and their mismatched rows into another, each with its sequences to request."""
    present = [example for example in examples if example is not None]
    order = [one.chosen for one in present] + [one.rejected for one in present if one.rejected is not None]
    pack: dict[str, Any] = collate(present)
    pack |= {"row": torch.arange(len(present)), _ASKED: [each for side in order for each in asked(side)]}
    others = [one.mismatched for one in present if one.mismatched is not None]
    packs: list[dict[str, Any]] = list(mismatched_packs(present, maxsize))
    for each, rows in zip(packs, by_budget([[one] for one in others], maxsize), strict=True):
        each[_ASKED] = [one for index in rows for one in asked(others[index])]
    return {"packs": [pack], "mismatched": packs}


class ServiceTrainer(TurnTrainer):
    """Trains a `RemotePolicy`: log-probabilities come from a service, and the loss's gradient is sent to it."""

    def __init__(
        self,
        policy: RemotePolicy,
        *,
        args: Any,
        request_tokens: int,
        reference: RemotePolicy | None,
        **settings: Any,
    ) -> None:
        """Tokenize and check the data, and request the reference log-probabilities from the service.

        Args:
            policy: The policy to train.
            args: Settings of the training.
            request_tokens: Largest number of tokens in one request.
            reference: The reference; None: the policy in its current state.
            settings: Other arguments of `TurnTrainer`.
        """
        self._request_tokens = request_tokens
        self._clip = float(args.max_grad_norm or 0)
        args.max_grad_norm = 0.0  # the service clips gradients
        args.bf16, args.fp16, args.mixed_precision = False, False, "no"  # the loss is computed in float32
        self.policy = policy
        super().__init__(policy, args=args, ref_model=reference, **settings)
        self.data_collator = service_batch
        self._sent: tuple[Sequence[Asked], list[Any], Tensor]

    def _open(self, model: RemotePolicy, reference: Any, peft_config: Any) -> RemotePolicy:
        names = ("reference", "proximal")
        self._frozen: Any = {each: _Asking(each, self._request_tokens) for each in names}
        self._context = context_length(model)
        return model

    def _prepare_passes(self) -> None:
        """Do nothing: the service computes the passes."""

    def _check_tokens(
        self, parts: Iterable[Examples], model: RemotePolicy, where: str = "training data"
    ) -> None:
        size = model.config.get_text_config().vocab_size
        largest = max(max(one.ids) for part in parts for one in sequences_of(part.rows))
        if largest >= size:
            raise DataError(f"{where}: token {largest} is none of the model, which has {size}.")

    def _compute_inputs(
        self,
        parts: Sequence[Examples],
        model: RemotePolicy,
        reference: Any,
        peft_config: Any,
        track: Track | None,
    ) -> RemotePolicy:
        self._check_tokens(parts, model)
        self._weigh(parts, model if reference is None else reference, track)
        if self.loss.traits.needs_proximal:
            self._frozen["proximal"].ask(parts, model, track)
        return model

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _pass(self, model: RemotePolicy, pack: Batch) -> tuple[Tensor, None, dict[str, Tensor]]:
        rows: Any = pack[_ASKED]
        found, flat = model.logprobs(rows, self._request_tokens)
        leaf = flat.to(self.args.device).requires_grad_(torch.is_grad_enabled())
        self._sent = rows, found, leaf
        return leaf, None, {}

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Request log-probabilities, compute the loss here, and send its gradient to the service."""
        model.train()
        (pack,) = self._prepare_inputs(inputs)["packs"]
        loss: Tensor = self.compute_loss(model, pack, num_items_in_batch=num_items_in_batch)
        loss.backward()
        rows, found, leaf = self._sent
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        self.policy.backward(rows, found, gradient, self._request_tokens)
        self.tokens_passed += sum(len(row.sequence.ids) for row in rows)
        return loss.detach()

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, whose steps the service makes."""
        args = self.args
        self.optimizer = self._adam = RemoteAdam(
            self.policy,
            {
                "learning_rate": args.learning_rate,
                "beta1": args.adam_beta1,
                "beta2": args.adam_beta2,
                "eps": args.adam_epsilon,
                "weight_decay": args.weight_decay,
                "grad_clip_norm": self._clip,
            },
        )
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry, with the norm of the gradient if the service reports it."""
        norm = next(
            (value for name, value in self._adam.measured.items() if name.endswith("grad_norm")), None
        )
        super().log(logs | ({"grad_norm": norm} if "loss" in logs and norm is not None else {}), start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy at the service, and write a file with the name of the saved state."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self.policy.save(f"{Path(str(self.args.output_dir)).stem}-{self.state.global_step}").write(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with resuming(resume_from_checkpoint):
            stored = stored_policy(resume_from_checkpoint)
            if stored is None:
                raise ModelError(f"checkpoint {resume_from_checkpoint!r} names no state of a service.")
            self.policy.load(stored)


class _Asking:
    """A frozen policy whose log-probabilities come from the service; used instead of `Frozen`."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most

    def ask(self, parts: Iterable[Examples], model: RemotePolicy, track: Track | None) -> None:
        """Add the policy's log-probabilities to each row."""
        for part in parts:
            sequences = [asked(one) for one in sequences_of(part.rows)]
            rows = [each for own in sequences for each in own]
            _, flat = model.logprobs(rows, self._most)
            lengths = [sum(len(each.at) for each in own) for own in sequences]
            part.rows = with_logprobs(part.rows, self._name, flat.split(lengths))
