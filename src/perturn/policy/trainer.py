"""TurnTrainer: a transformers Trainer for losses that weigh turns.

It takes Perturn trajectories or TRL's conversational data, computes the reference once before training, and
logs TRL's metric names. Everything else, from accelerate to the Hub, is the Trainer's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import Trainer

from perturn.data.cache import cache_folder
from perturn.data.trl import from_trl
from perturn.errors import ConfigError, DataError
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.adapters import add_adapters
from perturn.policy.batches import Collator, Examples, Filled, chosen_reference, empty_pack
from perturn.policy.checkpoints import resuming, saving
from perturn.policy.config import TurnConfig, section
from perturn.policy.logprobs import action_logprobs, prepare
from perturn.policy.means import Means
from perturn.policy.models import context_length, load_model
from perturn.policy.names import load_tokenizer
from perturn.policy.packing import Batch
from perturn.policy.reference import Track, reference_identity, reference_logprobs
from perturn.policy.tokens import Renderer, check_lengths, encode_example, sides
from perturn.policy.weighing import choose_credit, weigh
from perturn.settings.recipe import build
from perturn.types import PreferencePair, Trajectory

_logger = logging.getLogger(__name__)


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
        settings = section(args.loss, "loss")
        self.loss = build(LOSSES, settings, "loss")
        self.credit = choose_credit(
            self.loss, settings, None if args.credit is None else section(args.credit, "credit")
        )
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
        if self.needs_reference:  # before adapters, which may change the weights they are added to
            self._add_references((train, evaluation), model if ref_model is None else ref_model, track)
        for examples in (train, evaluation):
            self._add_weights(examples)
        if peft_config is not None:
            model = add_adapters(model, peft_config, args.seed)
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
        self._means = {"train": Means(), "eval": Means()}
        self._evaluated: dict[str, Tensor] = {}  # what `get_batch_samples` gives to packs of training

    @property
    def needs_reference(self) -> bool:
        """Whether the loss, or the credit, reads reference log-probabilities."""
        return self.loss.needs_reference or "reference" in self.credit.needs

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

    def _add_weights(self, examples: Examples | None) -> None:
        """Give each example the weights of its turns, and what the loss reads of all pairs of an optimizer step."""
        if examples is None:
            return
        examples.rows = [weigh(row, self.credit) for row in examples.rows]
        if hasattr(self.loss, "step_statistic"):
            statistics = self.loss.step_statistic(chosen_reference(examples.rows)).tolist()
            examples.rows = [
                replace(row, statistic=statistic)
                for row, statistic in zip(examples.rows, statistics, strict=True)
            ]

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Equally many batches for every process, and every row in one of them."""
        loader: Any = super()._get_dataloader(*args, **kwargs)
        if not (kwargs.get("is_training") and self.args.dataloader_drop_last):
            # With several processes, the batches that each is dealt come from those of all.
            batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
            loader.set_sampler(Filled(batches.sampler, loader.total_batch_size))
        return cast("DataLoader[Any]", loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of an optimizer step; each pack gets what the loss reads of all pairs of the step."""
        batches, pairs = super().get_batch_samples(epoch_iterator, num_batches, device)
        if hasattr(self.loss, "step_statistic"):
            packs = [pack for batch in batches for pack in batch["packs"]]
            own = torch.cat([torch.empty(0, device=device), *(pack["statistic"] for pack in packs)])
            step = torch.tensor(gather_object(own.tolist()), device=device)
            for pack in packs:
                pack["step"] = step
        return batches, pairs

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
        mean: Tensor = self.accelerator.reduce(total, "mean")  # or `train_loss` would be one process's
        return mean

    def _as_many_as_others(self, packs: list[Batch]) -> list[Batch]:
        """Packs of this process after empty ones, so that all processes make equally many passes."""
        if self.args.world_size == 1:
            return packs
        most = int(self.accelerator.gather(torch.tensor([len(packs)], device=self.args.device)).max())
        return [empty_pack()] * (most - len(packs)) + packs

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
        step = {"step": inputs["step"]} if "step" in inputs else {}
        value = self.loss(chosen, rejected, **step)  # rejected is None where the loss reads one side
        mode = "train" if self._is_training else "eval"
        self._record(chosen, rejected, mode, step)
        self._means[mode].add("loss", value.detach())
        share = value.numel() if num_items_in_batch is None else num_items_in_batch / self.args.world_size
        total = value.sum() / share
        return (total, {"loss": value.detach()}) if return_outputs else total

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Pairs of one optimizer step, over all its packs and all processes."""
        none = torch.zeros(1, dtype=torch.long, device=device)
        own = sum((pack["pairs"] for inputs in batch_samples for pack in inputs["packs"]), none)
        pairs: Tensor = self.accelerator.gather(own).sum()
        return pairs

    def _both_sides(
        self, inputs: Batch, logprobs: Tensor, pairs: int
    ) -> tuple[TurnLogprobs, TurnLogprobs | None]:
        """Split a pack's log-probabilities into its chosen and rejected trajectories."""
        turn, trajectory, reference = inputs["turn"], inputs["sequence"], inputs.get("reference")
        starts_turn = torch.ones_like(turn, dtype=torch.bool)
        starts_turn[1:] = (turn.diff() != 0) | (trajectory.diff() != 0)

        def side(mask: Tensor, first: int) -> TurnLogprobs:
            return TurnLogprobs(
                policy=logprobs[mask],
                reference=None if reference is None else reference[mask],
                turn=turn[mask],
                trajectory=trajectory[mask] - first,
                weight=inputs["weight"][mask[starts_turn]],
            )

        is_chosen = trajectory < pairs
        return side(is_chosen, 0), side(~is_chosen, pairs) if self.loss.needs_rejected else None

    @torch.no_grad()
    def _record(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs | None, mode: str, step: dict[str, Tensor]
    ) -> None:
        """Keep this pack's metrics until they are logged."""
        assert chosen.weight is not None
        found = {"logps/chosen": chosen.sum_by_trajectory(chosen.policy), "weight/chosen": chosen.weight}
        if rejected is not None:
            assert rejected.weight is not None
            rewards, others = self.loss.rewards(chosen), self.loss.rewards(rejected)
            found |= {
                "weight/rejected": rejected.weight,
                "logps/rejected": rejected.sum_by_trajectory(rejected.policy),
                "rewards/chosen": rewards,
                "rewards/rejected": others,
                "rewards/accuracies": (rewards > others).float(),
                "rewards/margins": rewards - others,
            }
            diagnostics = getattr(self.loss, "diagnostics", None)
            found |= diagnostics(chosen, rejected, **step) if diagnostics else {}
        for name, values in found.items():
            self._means[mode].add(name, values)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics since the last entry to the trainer's own entries of training."""
        if "loss" in logs or "train_loss" in logs:
            logs |= {name: mean for name, mean in self._means["train"].take().items() if name != "loss"}
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with saving(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"):
            super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with resuming(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with resuming(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with resuming(checkpoint):
            super()._load_rng_state(checkpoint)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate all rows as one step; every metric, the loss too, is a mean over them."""
        statistics = [row.statistic for row in cast("Examples", dataloader.dataset).rows]
        self._evaluated = {} if None in statistics else {"step": torch.tensor(statistics)}
        self._means["eval"] = Means()
        output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        prefix = kwargs["metric_key_prefix"]
        output.metrics.update({f"{prefix}_{name}": mean for name, mean in self._means["eval"].take().items()})
        return output

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not estimated: the Trainer's formula does not know which tokens reach the output layer."""
        return 0

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        """Evaluation computes the loss and nothing else; every process makes the passes of its own packs."""
        with torch.no_grad(), self.compute_loss_context_manager():
            packs = [
                self._prepare_inputs(pack | self._evaluated)
                for pack in self._as_many_as_others(inputs["packs"])
            ]
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
