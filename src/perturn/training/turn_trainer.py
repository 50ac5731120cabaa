"""`TurnTrainer`: a transformers `Trainer` for losses with a weight for each turn.

The trainer reads Perturn trajectories or TRL's conversational data, computes the reference once before training, and
logs TRL's metric names. Everything else, from accelerate to the Hub, is inherited from `Trainer`.
"""

from __future__ import annotations

import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader

from perturn.chat.control_tokens import keep_ends
from perturn.chat.model_names import tokenizer_of
from perturn.chat.tokens import Renderer
from perturn.errors import check_none
from perturn.formats.read_rows import Row
from perturn.formats.row_sources import Location
from perturn.io.atomic_write import writing
from perturn.losses.token_inputs import PolicyInput, token_inputs
from perturn.needs import Reference, reads
from perturn.policy.credit_weights import weigh_all
from perturn.policy.examples import Example, encode_example, warn_of_equal_weights
from perturn.policy.logprobs import Track, continuing, exact_length, logprobs_and_inputs
from perturn.policy.lora_adapters import cast_weights, check_trainable, load_to_train
from perturn.policy.models import add_adapters, check_vocabulary, context_length, disable_dropout, load_model
from perturn.policy.packing import (
    Batch,
    Collator,
    Examples,
    Filled,
    both_sides,
    empty_pack,
    mismatched_packs,
)
from perturn.training.credit_choice import loss_and_credit, trains_own_turns
from perturn.training.finite_metrics import refuse_not_finite
from perturn.training.frozen_policies import Frozen
from perturn.training.memory_errors import memory_remedies
from perturn.training.row_intake import mismatches, sequences_of, take_rows, with_mismatched
from perturn.training.sampled_rows import behavior_logprobs, weigh_rows, with_weight
from perturn.training.setting_checks import check_schedule, refuse_best_metric, unkept
from perturn.training.trainer_evaluation import (
    EvaluatingTrainer,
    Means,
    RowValues,
    encoded_sets,
    parts_of,
    row_values,
    step_metrics,
)
from perturn.training.turn_config import (
    TurnConfig,
    config_of,
    may_begin,
    section,
    share_kept,
)
from perturn.types import Trajectory, WeightedTrajectory


class TurnTrainer(EvaluatingTrainer):
    """Trains a causal language model on trajectories or preference pairs, turn by turn."""

    def __init__(
        self,
        model: Any,
        args: TurnConfig | None = None,
        train_dataset: Iterable[Any] | Location | None = None,
        eval_dataset: Iterable[Any] | Location | Mapping[str, Iterable[Any] | Location] | None = None,
        processing_class: Any = None,
        *,
        ref_model: Any = None,
        peft_config: Any = None,
        track: Track | None = None,
        **trainer: Any,
    ) -> None:
        """Tokenize and check the data, and compute the reference log-probabilities.

        Args:
            model: A causal language model, or its name or folder. Adapters in a folder or a `peft.PeftModel` are
                trained further. With a `peft_config`, a folder's adapters are merged and new adapters are trained.
            args: Settings of the training; None: the defaults.
            train_dataset: Pairs, trajectories, or rows in a public format; a file or folder of rows, or a dataset of
                the Hub (`owner/name:split`). For credits that need groups, rows of one task and policy form a group.
            eval_dataset: Rows to evaluate on, in the same formats, or a dict of several sets by name.
            processing_class: The tokenizer; None: the model's own.
            ref_model: The reference policy or its name; None: the model in its current state.
            peft_config: Settings of new adapters, which are trained instead of all weights; None: no new adapters.
            track: Function that wraps an iterable to show progress; None: tqdm, unless `disable_tqdm` is set.
            trainer: Other arguments of `transformers.Trainer`, such as `callbacks`.

        Raises:
            PerturnError: If a setting or a row is wrong; always before training starts.
        """
        args = self.turn_args = config_of(args)
        self._read_settings(trainer, eval_dataset is not None)
        model, ref_model = (str(each) if isinstance(each, Path) else each for each in (model, ref_model))
        processing_class = tokenizer_of(model, processing_class, "processing_class")
        self.renderer = Renderer(processing_class, args.chat_template)
        model = self._open(model, ref_model, peft_config)
        train = None if train_dataset is None else self._encode(train_dataset, "train")
        evaluation = None if eval_dataset is None else encoded_sets(eval_dataset, "eval", self._encode)
        refuse_best_metric(args.metric_for_best_model, evaluation)
        self._kept = share_kept(args.episodes, train)
        with memory_remedies(args):
            model = self._compute_inputs(parts_of(train, evaluation), model, ref_model, peft_config, track)
            super().__init__(
                model=model,
                args=args,
                data_collator=Collator(args.token_budget),
                train_dataset=train,
                eval_dataset=cast(Any, evaluation),
                processing_class=self.renderer.tokenizer,
                **trainer,
            )
            check_trainable(model, args.learning_rate)
            self._prepare_passes()
        begins = may_begin(args, model, self.accelerator.distributed_type)
        self.data_collator = Collator(args.token_budget, begins)
        self.loss_is_scaled_for_ga = True  # compute_loss divides by the pairs of the whole optimizer step
        self._means = {"train": Means(), "eval": Means()}
        self._evaluated: dict[str, Tensor] = {}  # for training, `get_batch_samples` adds these to packs
        self._row_values, self.tokens_passed = RowValues(), 0  # for progress displays

    def _read_settings(self, trainer: Mapping[str, Any], evaluates: bool) -> None:
        """Build loss and credit, and reject unsupported settings, before any model is loaded."""
        args = self.turn_args
        credit = None if args.credit is None else section(args.credit, "credit")
        self.loss: Any
        self.loss, self.credit = loss_and_credit(section(args.loss, "loss"), credit)
        inputs = token_inputs(self.loss.traits.reads)
        of_policy = {name: each for name, each in inputs.items() if each.traits.policy is None}
        self._of_policy = cast("dict[str, PolicyInput]", of_policy)
        self._of_frozen = {name: each.traits.policy for name, each in inputs.items() if each.traits.policy}
        check_none(unkept(args, self.loss, trainer, evaluates))

    def _open(self, model: Any, reference: Any, peft_config: Any) -> Any:
        """Return the model to train, and store how to load the reference again for rows that are added later.

        A reference given as a model is only referenced weakly. After the caller deletes it, later rows are rejected.
        """
        args = self.turn_args
        names = ("reference", "proximal", *self._of_frozen)
        self._frozen = {each: Frozen(each, args, self._autocast) for each in names}
        self._own_reference = reference is None
        again: Callable[[], Any] | None = None
        if isinstance(model, str):
            again = partial(load_to_train, model, peft_config is not None, not args.disable_dropout)
            model = again()
        if reference is not None:
            again = partial(load_model, reference) if isinstance(reference, str) else weakref.ref(reference)
        self._frozen["reference"].keep(again)
        context_length(model)  # logs a limit below the context
        self._context = exact_length(model)
        return model

    def _compute_inputs(
        self, parts: Sequence[Examples], model: Any, reference: Any, peft_config: Any, track: Track | None
    ) -> Any:
        """Add log-probabilities of frozen policies to the rows; return the model to train, with its adapters."""
        self._check_tokens(parts, model)
        if self.turn_args.disable_dropout:
            disable_dropout(model)
        keep_ends(model, self.renderer.end_ids)
        if peft_config is not None and self.turn_args.fsdp:  # frozen weights then take half the memory
            cast_weights(model, torch.bfloat16)
        # Compute the reference before adding adapters, since some adapters change the base weights.
        self._weigh(parts, model if reference is None else reference, track)
        if peft_config is not None:
            if self.needs_reference and reference is None:
                self._frozen["reference"].keep_beneath(model)
            model = add_adapters(model, peft_config, self.turn_args.seed)
        if self.loss.traits.needs_proximal:
            self._frozen["proximal"].ask(parts, model, track)
        return model

    def _weigh(self, parts: Sequence[Examples], reference: Any, track: Track | None) -> None:
        """Add the frozen policies' log-probabilities that loss and credit read to the rows, then the turn weights."""
        if self.needs_reference:
            reference = load_model(reference) if isinstance(reference, str) else reference
            self._check_tokens(parts, reference, "training data for the reference")
            self._frozen["reference"].ask(parts, reference, track)
        for name, policy in self._of_frozen.items():
            self._frozen[name].keep(partial(load_model, policy))
            frozen = load_model(policy)
            self._check_tokens(parts, frozen, f"training data for {name}")
            self._frozen[name].ask(parts, frozen, track)
        for part in parts:
            part.rows = weigh_all(part.rows, self.loss, self.credit)
            warn_of_equal_weights(part.rows, self.credit)

    def _encode_later(self, rows: Iterable[Any], name: str) -> Examples:
        """Encode rows that are added after `__init__`, as examples with the same fields as the first rows."""
        if isinstance(rows, Examples):
            return rows
        part = self._encode(rows, name)
        self._check_tokens([part], self.model)
        divided = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.needs_reference:
            of_own = self._own_reference and not divided
            self._frozen["reference"].ask_later(part, self.model if of_own else None)
        for name in self._of_frozen:
            self._frozen[name].ask_later(part, None)
        part.rows = weigh_all(part.rows, self.loss, self.credit)
        if self.loss.traits.needs_proximal:
            self._frozen["proximal"].ask_later(part, None if divided else self.model)
        return part

    @property
    def needs_reference(self) -> bool:
        """Whether the loss, or the credit, reads reference log-probabilities."""
        return self.loss.traits.needs_reference or reads(self.credit.needs, Reference)

    def _encode(self, rows: Iterable[Any] | Location, name: str) -> Examples:
        """Convert rows into checked examples."""
        args = self.turn_args
        how = (self._example, self.renderer.tokenizer, args.max_length, self._context)
        encoded, taken = take_rows(rows, name, self.loss, *how)
        if self.loss.traits.needs_mismatched:
            limit = args.max_length or self._context
            encoded = with_mismatched(encoded, cast("list[WeightedTrajectory]", taken), self.renderer, limit)
        return Examples(
            weigh_rows(encoded, taken, self.credit) if self.credit.traits.needs_group else encoded
        )

    def _check_tokens(self, parts: Iterable[Examples], model: Any, where: str = "training data") -> None:
        """Reject tokens that a model has no embedding for."""
        ids = {token for part in parts for sequence in sequences_of(part.rows) for token in sequence.ids}
        check_vocabulary(model, self.renderer.tokenizer, ids, where)

    def _example(self, row: Row) -> Example:
        """Encode a row as tokens, with its weights, and with its sampling log-probabilities if the loss reads them."""
        trajectory = row.trajectory if isinstance(row, WeightedTrajectory) else row
        args = self.turn_args
        how = (args.max_length, args.shared_prefix, args.loss_on, trains_own_turns(self.credit))
        example = encode_example(row, self.renderer, *how)
        if self.loss.traits.needs_behavior and isinstance(trajectory, Trajectory):
            example = replace(example, behavior=(behavior_logprobs(trajectory, example.chosen),))
        if not isinstance(row, WeightedTrajectory):
            return example
        return with_weight(example, row.weight, row.clip, row.has_spread)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return a loader that gives every process the same number of batches, and every row once."""
        loader: Any = super()._get_dataloader(*args, **kwargs)
        if not (kwargs.get("is_training") and self.args.dataloader_drop_last):
            # With several processes, accelerate wraps the batch sampler of all processes.
            batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
            rows = self.turn_args.rows_per_batch if kwargs.get("is_training") else None
            loader.set_sampler(Filled(batches.sampler, loader.total_batch_size, rows))
        return cast("DataLoader[Any]", loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the batches of an optimizer step; each pack gets the loss's inputs over all pairs of the step."""
        batches, pairs = super().get_batch_samples(epoch_iterator, num_batches, device)
        packs = [pack for batch in batches for pack in batch["packs"]]
        if self.loss.traits.step_statistic:
            own = torch.cat([torch.empty(0, device=device), *(pack["statistic"] for pack in packs)]).tolist()
        elif self.loss.traits.needs_mismatched:
            own = self._mismatches([pack for batch in batches for pack in batch["mismatched"]])
        else:
            return batches, pairs
        step = torch.tensor(gather_object(own), device=device)
        for pack in packs:
            pack["step"] = step
        return batches, pairs

    def _mismatches(self, packs: list[Batch]) -> list[float]:
        """Return the loss's inputs for this process's mismatched rows, under the current policy."""
        packs = [self._prepare_inputs(pack) for pack in self._as_many_as_others(packs)]
        return mismatches(self.loss, partial(self._pass, self.model), packs)

    def _statistics(self, rows: Sequence[Example]) -> list[Any]:
        """Return, for each evaluated row, the number that the loss reads, or None if it reads no number."""
        if not self.loss.traits.needs_mismatched:
            return [row.statistic for row in rows]
        packs = mismatched_packs(rows, self.turn_args.token_budget)
        return self._mismatches([self._prepare_inputs(pack) for pack in packs])

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context with the precision of training, so that policy and reference start with equal outputs."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = kinds.get(self.turn_args.mixed_precision)  # also set by `accelerate launch`
        return nullcontext() if dtype is None else torch.autocast(self.turn_args.device.type, dtype)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward passes pack by pack; gradients are accumulated, and exchanged once at the end."""
        state, total = self.accelerator.gradient_state, torch.zeros((), device=self.args.device)
        packs, exchange = self._as_many_as_others(inputs["packs"]), state.sync_gradients
        model.train()
        getattr(self.optimizer, "train", lambda: None)()  # schedule-free optimizers move the weights
        with memory_remedies(self.turn_args), continuing(model, inputs.get("beginning"), self._autocast):
            for index, pack in enumerate(packs):
                waits = index < len(packs) - 1
                state._set_sync_gradients(exchange and not waits)
                # DeepSpeed does not support no_sync; with FSDP, it would keep unsharded gradients in each process.
                whole = self.accelerator.distributed_type not in (
                    DistributedType.DEEPSPEED,
                    DistributedType.FSDP,
                )
                with self.accelerator.no_sync(model) if waits and whole else nullcontext():
                    total += super().training_step(model, pack, num_items_in_batch)
                self.tokens_passed += len(pack["ids"])
        return cast(Tensor, self.accelerator.reduce(total, "mean"))  # so `train_loss` covers all processes

    def _as_many_as_others(self, packs: list[Batch]) -> list[Batch]:
        """Put empty packs before this process's packs, so that all processes make the same number of passes."""
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
        """Return the sum of a pack's losses divided by the number of pairs in the optimizer step.

        With `return_outputs`, the outputs are the values of the pack's rows by name [rows].
        """
        logprobs, entropy, read = self._pass(model, inputs)
        if not inputs["pairs"]:
            return (logprobs.sum() * 0.0, {}) if return_outputs else logprobs.sum() * 0.0
        chosen, rejected = both_sides(inputs, logprobs, read)
        step = {"step": inputs["step"]} if "step" in inputs else {}
        value, of_rows = row_values(self.loss, chosen, rejected, step)
        for name, values in (of_rows | step_metrics(self.loss, chosen, rejected, step, entropy)).items():
            self._means["train" if model.training else "eval"].add(name, values)
        share = value.numel() if num_items_in_batch is None else num_items_in_batch / self.args.world_size
        total = value.sum() / share * self._kept
        return (total, of_rows) if return_outputs else total

    def _pass(self, model: Any, pack: Batch) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return log-probabilities of a pack's loss tokens, their entropies, and other inputs of the loss."""
        with self._autocast():
            return logprobs_and_inputs(model, pack, self._of_policy)

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Return the number of pairs in an optimizer step, over all packs and all processes."""
        none = torch.zeros(1, dtype=torch.long, device=device)
        own = sum((pack["pairs"] for inputs in batch_samples for pack in inputs["packs"]), none)
        return cast(Tensor, self.accelerator.gather(own).sum())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log an entry of the trainer; entries of training also get the mean metrics since the last entry.

        Raises:
            RunError: If the loss or the norm of the gradient is not finite.
        """
        if "loss" in logs or "train_loss" in logs:
            logs |= {name: mean for name, mean in self._means["train"].take().items() if name != "loss"}
        super().log(logs, start_time)
        refuse_not_finite(logs, self.state.global_step, scaled=self.args.mixed_precision == "fp16")

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the learning-rate schedule; with `optimizer_from`, load the state of optimizer and schedule.

        If a long schedule is run as several trainings of one step each, the first training skips the first schedule
        step, whose learning rate is 0 during warmup.
        """
        args = self.turn_args
        steps = args.schedule_steps or num_training_steps
        rises = num_training_steps == 1 < steps and args.get_warmup_steps(steps) > 0
        scheduler = super().create_scheduler(steps + rises, optimizer)
        if args.optimizer_from is not None:
            self._load_optimizer_and_scheduler(args.optimizer_from)
        elif rises:
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                scheduler.step()  # torch warns that no optimizer step came first
        check_schedule(args, self.lr_scheduler, steps + rises, num_training_steps)
        return self.lr_scheduler

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint; if writing fails, for example on a full disk, remove the incomplete checkpoint."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with writing(folder, foreign=(Exception,)):  # libraries raise their own errors for a full disk
            try:
                super()._save_checkpoint(model, trial)
            except Exception:
                shutil.rmtree(folder, ignore_errors=True)
                raise
