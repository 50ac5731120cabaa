"""Checks of the trainer's settings against its loss, its other arguments and its sets of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

from transformers import SchedulerType, Trainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from perturn.config.peer_settings import peers
from perturn.errors import check_fit
from perturn.training.trainer_evaluation import Sets
from perturn.training.turn_config import TurnConfig

_ONE_CALL = {
    "prediction_loss_only": False,
    "batch_eval_metrics": False,
    "eval_do_concat_batches": True,
    "include_for_metrics": [],
}
"""Values of transformers' settings with which `compute_metrics` is called once, with the values of all rows."""

_ENDLESS = (
    SchedulerType.CONSTANT,
    SchedulerType.CONSTANT_WITH_WARMUP,
    SchedulerType.INVERSE_SQRT,
    SchedulerType.REDUCE_ON_PLATEAU,
)
"""Schedules that do not depend on their number of steps."""


def unkept(args: TurnConfig, loss: Any, trainer: Mapping[str, Any], evaluates: bool) -> Iterator[str]:
    """Yield an error message for each setting that packed training or this loss does not support.

    Args:
        args: Settings of the training.
        loss: The loss.
        trainer: Other arguments of `transformers.Trainer`.
        evaluates: Whether there are rows to evaluate on.
    """
    if args.loss_on == "all" and (loss.traits.needs_rejected or loss.traits.needs_behavior):
        yield "loss_on must be actions with a loss on pairs or groups, got all; nobody chose the text that was read."
    if args.n_gpu > 1:
        yield (
            f"this process sees {args.n_gpu} GPUs and trains on one; set CUDA_VISIBLE_DEVICES=0, or start a process "
            f"for each GPU: accelerate launch --num_processes {args.n_gpu} ..., or torchrun --nproc_per_node "
            f"{args.n_gpu} ..."
        )
    rows, most = args.rows_per_batch, args.train_batch_size * args.world_size
    if rows is not None and rows > most:
        yield (
            f"rows_per_batch must be <= {most}, per_device_train_batch_size times the number of processes, got {rows}."
        )
    if rows is not None and args.dataloader_drop_last:
        yield "dataloader_drop_last must be False with rows_per_batch."
    yield from _unknown_arguments(trainer)
    if trainer.get("compute_loss_func") is not None:
        yield "compute_loss_func must be None; name a loss of your own in TurnConfig(loss={'name': 'file.py:Class'})."
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        yield (
            "use_liger_kernel replaces the model's forward pass, which packing needs; set liger_kernel_config="
            "{'fused_linear_cross_entropy': False, 'cross_entropy': False}."
        )
    if is_deepspeed_zero3_enabled():
        yield "deepspeed: ZeRO-3 is not supported; take FSDP2 (fsdp='full_shard', fsdp_config={'version': 2})."
    if trainer.get("preprocess_logits_for_metrics") is not None:
        yield "preprocess_logits_for_metrics must be None: a prediction holds values of rows, no logits."
    if args.eval_strategy != "no" and not evaluates:
        yield "eval_strategy needs rows to evaluate on; give TurnTrainer an eval_dataset, or set eval_strategy='no'."
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        yield "save_strategy=best needs metric_for_best_model, such as eval_loss."
    if "inputs" in args.include_for_metrics:
        yield "include_for_metrics must be without 'inputs': rows are packed, so there is no batch of inputs."
    for name, needed in _ONE_CALL.items() if trainer.get("compute_metrics") is not None else ():
        if getattr(args, name) != needed:
            yield (
                f"{name} must be {needed} with compute_metrics, got {getattr(args, name)}; the function is called "
                "once, with the values of all rows."
            )


_INSTEAD = {
    "tokenizer": "write processing_class",
    "data_collator": "rows are packed without padding by the trainer's own collator",
    "model_init": "give the model",
    "formatting_func": "give rows in a supported shape (docs: Files and rows)",
    "quantization_config": "load the model with it, and give the model",
    "reward_funcs": "rewards belong to an environment or to rows (docs: Learn online)",
}
"""Argument of another trainer -> what to do instead."""
_GIVEN = frozenset(
    {
        "self",
        "model",
        "args",
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "model_init",
    }
)
"""Arguments of `Trainer` that `TurnTrainer` has itself, or does not pass on."""


def _unknown_arguments(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each argument that `Trainer` does not take from `TurnTrainer`."""
    known = signature(Trainer.__init__).parameters.keys() - _GIVEN
    for name in sorted(trainer.keys() - known):
        of_config = peers()[name].in_config if name in peers() else f"known: {', '.join(sorted(known))}"
        yield f"TurnTrainer takes no argument {name!r}; {_INSTEAD.get(name, of_config)}".rstrip(".") + "."


def refuse_best_metric(metric: str | None, sets: Sets | None) -> None:
    """Reject a metric for the best model that no evaluation gives, before training starts.

    Args:
        metric: The setting `metric_for_best_model`; transformers sets it to `loss` if `load_best_model_at_end` is set.
        sets: Sets to evaluate on. With a single set, metrics do not contain its name, as in `eval_loss`.

    Raises:
        ConfigError: If there are several sets, and the metric does not belong to any of them.
    """
    if metric is None or not isinstance(sets, dict):
        return
    fits = any(metric.removeprefix("eval_").startswith(f"{name}_") for name in sets)
    must = f"be a metric of one set of eval_dataset, such as {f'eval_{next(iter(sets))}_loss'!r}"
    check_fit(fits, "metric_for_best_model", must, metric)


def check_schedule(args: TurnConfig, schedule: Any, steps: int, wanted: int) -> None:
    """Reject a training that goes beyond the end of its learning-rate schedule, where the rate is 0 or rises again.

    Args:
        args: Settings of the training.
        schedule: The schedule, after the steps of earlier trainings. The first may have been one step ahead.
        steps: Number of steps of the schedule.
        wanted: Number of optimizer steps of this training.

    Raises:
        ConfigError: If too few steps are left.
    """
    if args.schedule_steps is None or SchedulerType(args.lr_scheduler_type) in _ENDLESS:
        return
    made = schedule.last_epoch
    check_fit(
        made < steps and made + wanted <= steps + 1,
        "schedule_steps",
        f"be >= {made + wanted}, the optimizer steps of this training and of those before it",
        args.schedule_steps,
        "perturn.Trainer sets it from iterations: raise iterations, or leave it out for a constant rate.",
    )
