"""TurnTrainer: a transformers Trainer for losses that weigh turns.

It takes Perturn trajectories or TRL's conversational data, computes the reference once before training, and
logs TRL's metric names. Everything else, from accelerate to the Hub, is the Trainer's own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import Trainer

from perturn.cache import cache_folder
from perturn.config import build
from perturn.errors import ConfigError, DataError
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.examples import Collator, Example, check_lengths, encode_example, sides
from perturn.policy.logprobs import action_logprobs, loss_turns, prepare
from perturn.policy.models import context_length, load_model, load_tokenizer
from perturn.policy.packing import Batch
from perturn.policy.reference import Track, reference_identity, reference_logprobs
from perturn.policy.tokens import Renderer
from perturn.trainer_config import TurnConfig, loss_section
from perturn.trl_format import from_trl
from perturn.types import PreferencePair, Trajectory

_logger = logging.getLogger(__name__)


_Sums = dict[str, list[Tensor]]
"""Metric -> [sum, count] of each batch since the last log entry."""


class Examples(Dataset[Example]):
    """Encoded rows, as the Trainer reads them."""

    def __init__(self, rows: list[Example]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.rows[index]


class TurnTrainer(Trainer):
    """Trains a causal language model on trajectories or preference pairs, turn by turn."""

    def __init__(
        self,
        model: Any,
        args: TurnConfig | None = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Iterable[Any] | None = None,
        processing_class: Any = None,
        *,
        ref_model: Any = None,
        peft_config: Any = None,
        track: Track | None = None,
        **trainer: Any,
    ) -> None:
        """Tokenize the data, check it, and compute the reference.

        Args:
            model: A causal language model, or the name of one.
            args: Settings.
            train_dataset: `PreferencePair`s, `Trajectory`s, or rows in TRL's conversational formats.
            eval_dataset: The same, to evaluate on.
            processing_class: The tokenizer; None: the model's own.
            ref_model: The reference policy; None: the model as it is now.
            peft_config: Train these adapters instead of all weights.
            track: Wraps an iterable to show progress; None: tqdm, unless `disable_tqdm`.
            trainer: Further arguments of `transformers.Trainer`, such as `callbacks`.

        Raises:
            PerturnError: If a setting or a row is wrong, in one line, before any training.
        """
        args = self.turn_args = args or TurnConfig(output_dir="perturn-output")
        self.loss = build(LOSSES, loss_section(args.loss), "loss")
        if isinstance(model, str):
            processing_class = processing_class or load_tokenizer(model)
            model = load_model(model)
        self.renderer = Renderer(
            processing_class or load_tokenizer(model.config.name_or_path), args.chat_template
        )
        self._context = context_length(model)
        train = self._encode(train_dataset, args, "train")
        evaluation = self._encode(eval_dataset, args, "eval")
        if args.disable_dropout:
            _disable_dropout(model)
        prepare(model)
        if self.loss.needs_reference:  # before adapters, which may change the weights they are added to
            self._add_references((train, evaluation), model if ref_model is None else ref_model, track)
        if peft_config is not None:
            model = _add_adapters(model, peft_config, args.seed)
        super().__init__(
            model=model,
            args=args,
            data_collator=Collator(args.token_budget),
            train_dataset=train,
            eval_dataset=evaluation,
            processing_class=self.renderer.tokenizer,
            **trainer,
        )
        _refuse_data_parallel(self.args.n_gpu)
        self.loss_is_scaled_for_ga = True  # compute_loss divides by the pairs of the whole optimizer step
        self._sums: dict[str, _Sums] = {mode: defaultdict(list) for mode in ("train", "eval")}

    def _parse(self, row: Any, index: int) -> Trajectory | PreferencePair:
        """A row in any of the accepted forms; a pair becomes its chosen side where the loss reads one side."""
        parsed = (
            row if isinstance(row, Trajectory | PreferencePair) else from_trl(row, task_id=f"row-{index}")
        )
        if isinstance(parsed, PreferencePair):
            return parsed if self.loss.needs_rejected else parsed.chosen
        if self.loss.needs_rejected:
            raise DataError(
                "the loss compares two trajectories, but the row has one; give chosen and rejected."
            )
        return parsed

    def _encode(self, rows: Iterable[Any] | None, args: TurnConfig, name: str) -> Examples | None:
        """Rows -> checked examples."""
        if rows is None:
            return None
        encoded = []
        for index, row in enumerate(rows):
            where = f"{name} row {index}"
            try:
                parsed = self._parse(row, index)
                encoded.append(encode_example(parsed, self.renderer, args.max_length, args.shared_prefix))
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        if not encoded:
            raise DataError(f"the {name} dataset is empty; give at least one row.")
        check_lengths(encoded, self._context)
        dropped = sum(side.dropped_turns for side in sides(encoded))
        if dropped:
            cut = sum(side.dropped_turns > 0 for side in sides(encoded))
            _logger.warning(
                "%s: dropped %d turns from the end of %d trajectories to keep max_length=%s",
                name,
                dropped,
                cut,
                args.max_length,
            )
        return Examples(encoded)

    def _add_references(self, parts: Iterable[Examples | None], reference: Any, track: Track | None) -> None:
        """Give the examples of training and evaluation the reference's log-probabilities; it is not needed again."""
        home, device = reference.device, self.turn_args.device
        if home != device:
            reference.to(device)
        identity = reference_identity(reference, self._autocast)
        for examples in parts:
            if examples is not None:
                self._add_reference(examples, reference, identity, track or self._tqdm)
        if home != device:
            reference.to(home)

    def _add_reference(self, examples: Examples, reference: Any, identity: str, track: Track) -> None:
        """Give each example the reference's log-probabilities."""
        folder = self.turn_args.reference_cache
        logprobs = reference_logprobs(
            reference,
            list(sides(examples.rows)),
            folder=Path(folder) if folder else cache_folder() / "reference",
            identity=identity,
            token_budget=self.turn_args.token_budget,
            precision=self._autocast,
            track=track,
        )
        found = iter(logprobs)
        examples.rows = [
            replace(row, reference=tuple(next(found) for _ in row.sides)) for row in examples.rows
        ]

    @property
    def _is_training(self) -> bool:
        assert self.model is not None
        return self.model.training

    def _autocast(self) -> AbstractContextManager[Any]:
        """The precision training will run in, so that policy and reference start equal."""
        dtype = torch.bfloat16 if self.turn_args.bf16 else torch.float16 if self.turn_args.fp16 else None
        return nullcontext() if dtype is None else torch.autocast(self.turn_args.device.type, dtype)

    def _tqdm(self, work: Iterable[Any]) -> Iterable[Any]:
        shown: Iterable[Any] = tqdm(work, desc="reference", disable=self.turn_args.disable_tqdm)
        return shown

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one pack after the other; gradients add up and are exchanged once."""
        state = self.accelerator.gradient_state
        exchange = state.sync_gradients
        total = torch.zeros((), device=self.args.device)
        packs = self._as_many_as_others(inputs["packs"])
        for index, pack in enumerate(packs):
            waits = index < len(packs) - 1
            state._set_sync_gradients(exchange and not waits)
            deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED  # has no no_sync
            with self.accelerator.no_sync(model) if waits and not deepspeed else nullcontext():
                total += super().training_step(model, pack, num_items_in_batch)
        return total

    def _as_many_as_others(self, packs: list[Batch]) -> list[Batch]:
        """Packs of this process, and empty-handed repeats of one, so that all processes make equally many passes."""
        if self.args.world_size == 1:
            return packs
        most = int(self.accelerator.gather(torch.tensor([len(packs)], device=self.args.device)).max())
        return [{**packs[0], "pairs": packs[0]["pairs"] * 0}] * (most - len(packs)) + packs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Sum of a pack's losses over the number of pairs in the optimizer step."""
        with self._autocast():
            logprobs = action_logprobs(model, inputs)
        pairs = int(inputs["pairs"].sum())
        if not pairs:
            return logprobs.sum() * 0.0
        chosen, rejected = self._both_sides(inputs, logprobs, pairs)
        value = self.loss(chosen, rejected)  # rejected is None where the loss reads one side
        mode = "train" if self._is_training else "eval"
        self._record(chosen, rejected, mode)
        self._add(mode, "loss", value.detach())
        share = value.numel() if num_items_in_batch is None else num_items_in_batch / self.args.world_size
        total = value.sum() / share
        return (total, {"loss": value.detach()}) if return_outputs else total

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Pairs of one optimizer step, over all its packs and all processes."""
        pairs = (
            torch.cat([pack["pairs"] for inputs in batch_samples for pack in inputs["packs"]])
            .sum()
            .to(device)
        )
        return self.accelerator.gather(pairs).sum() if self.args.world_size > 1 else pairs

    def _both_sides(
        self, inputs: Batch, logprobs: Tensor, pairs: int
    ) -> tuple[TurnLogprobs, TurnLogprobs | None]:
        """Split a pack's log-probabilities into its chosen and rejected trajectories."""
        turn, trajectory = loss_turns(inputs)
        reference = inputs.get("reference")

        def side(mask: Tensor, first: int) -> TurnLogprobs:
            return TurnLogprobs(
                policy=logprobs[mask],
                reference=None if reference is None else reference[mask],
                turn=turn[mask],
                trajectory=trajectory[mask] - first,
            )

        is_chosen = trajectory < pairs
        return side(is_chosen, 0), side(~is_chosen, pairs) if self.loss.needs_rejected else None

    @torch.no_grad()
    def _record(self, chosen: TurnLogprobs, rejected: TurnLogprobs | None, mode: str) -> None:
        """Keep this batch's metrics until they are logged."""
        found = {"logps/chosen": chosen.sum_by_trajectory(chosen.policy)}
        if rejected is not None:
            rewards, others = self.loss.rewards(chosen), self.loss.rewards(rejected)
            found |= {
                "logps/rejected": rejected.sum_by_trajectory(rejected.policy),
                "rewards/chosen": rewards,
                "rewards/rejected": others,
                "rewards/accuracies": (rewards > others).float(),
                "rewards/margins": rewards - others,
            }
            diagnostics = getattr(self.loss, "diagnostics", None)
            found |= diagnostics(chosen, rejected) if diagnostics else {}
        for name, values in found.items():
            self._add(mode, name, values)

    def _add(self, mode: str, name: str, values: Tensor) -> None:
        """Keep the sum and the count of a metric's values, over all processes."""
        part = torch.stack([values.float().sum(), values.new_tensor(values.numel(), dtype=torch.float)])
        self._sums[mode][name].append(self.accelerator.gather(part).view(-1, 2).sum(0))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics since the last entry; every one, the loss too, is a mean over all pairs it saw."""
        mode = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        prefix = "eval_" if mode == "eval" else ""
        for name, values in self._sums[mode].items():
            total, count = torch.stack(values).sum(0).tolist()
            if name != "loss" or "eval_loss" in logs:  # the trainer's own training loss is right already
                logs[prefix + name] = total / count
        self._sums[mode].clear()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not estimated: the Trainer's formula does not know which tokens reach the output layer."""
        return 0

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        """Evaluation computes the loss and nothing else; every process makes the passes of its own packs."""
        with torch.no_grad(), self.compute_loss_context_manager():
            packs = [self._prepare_inputs(pack) for pack in self._as_many_as_others(inputs["packs"])]
            pairs = int(sum(pack["pairs"].sum() for pack in packs))
            losses = [
                self.compute_loss(model, pack, num_items_in_batch=pairs * self.args.world_size)
                for pack in packs
            ]
        return torch.stack(losses).sum(), None, None


def _refuse_data_parallel(gpus: int) -> None:
    """Several GPUs in one process would split a batch that is not made of rows."""
    if gpus > 1:
        raise ConfigError(
            f"this process sees {gpus} GPUs; start one process each with `accelerate launch` or `torchrun`, "
            "or show it one with CUDA_VISIBLE_DEVICES=0."
        )


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # attention layers keep theirs as a number
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _add_adapters(model: Any, peft_config: Any, seed: int) -> Any:
    """Wrap the model; equal seeds give equal adapters."""
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError('peft_config needs peft; run: pip install "perturn[lora]"') from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, peft_config)
