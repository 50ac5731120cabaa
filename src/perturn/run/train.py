"""Train a run's policies: SFT on expert episodes, then alignment on preference pairs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from perturn.data.outcomes import succeeded
from perturn.data.run_folder import Run
from perturn.data.store import read_pairs, read_trajectories
from perturn.data.token_texts import note_tokens
from perturn.errors import RunError
from perturn.io.writing import append_line, replacing, write_whole
from perturn.losses import TurnLogprobs
from perturn.policy.agreement import differences, summary
from perturn.policy.config import TurnConfig
from perturn.policy.models import compute_dtype, context_length, device, load_model
from perturn.policy.names import load_tokenizer
from perturn.policy.packing import Examples
from perturn.policy.templates import chat_template
from perturn.policy.tokens import NO_TURN, Example
from perturn.policy.trainer import TurnTrainer
from perturn.run.progress import bar, console, track
from perturn.run.session import Session, policy_path
from perturn.run.tracking import PROJECT, open_trackers
from perturn.settings.recipe import Lora, Recipe, Train
from perturn.settings.stages import Stage
from perturn.types import PreferencePair, Trajectory

_CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TurnConfig.__dataclass_fields__
    else "gradient_checkpointing"
)
"""The setting's name in transformers; older versions, such as vLLM's, have it by its old one."""

_ROUNDING = 0.1
"""Nats by which bfloat16 may change half of the tokens' log-probabilities; 0.03 was seen."""


def train(session: Session, stage: Stage) -> None:
    """Train a policy, going on from the last complete checkpoint, and save it whole."""
    run, recipe = session.run, session.recipe
    settings, rows = _taught(session) if stage.name == "sft" else _paired(session, stage)
    session.release()
    with run.stage(stage.name, run.checkpoint(stage.policy), *_facts(run, stage)) as counts:
        partial = run.checkpoint(f"{stage.policy}.partial")
        path = policy_path(run, stage.start)
        model = load_model(path, say=console.print)
        progress = _Progress(run, stage.name, f"training {stage.policy}")
        resume = last_checkpoint(partial)
        step = int(resume.rpartition("-")[2]) if resume else 0
        trainer = TurnTrainer(
            model,
            args=make_config(recipe, settings, partial, limit=context_length(model)),
            train_dataset=rows,
            processing_class=load_tokenizer(path),
            peft_config=settings.lora and lora_config(settings.lora),
            track=lambda work: track(work, "reference"),
            callbacks=[progress],
        )
        trainer.remove_callback(PrinterCallback)
        assert isinstance(trainer.train_dataset, Examples)
        counts |= count_tokens(trainer.train_dataset)
        if trainer.needs_reference:
            _write_reference(run, stage, trainer, settings.loss)
            _note_agreement(run, stage, trainer, rows)
        with (
            closing(progress),
            open_trackers(recipe.report_to, run.folder, recipe.name, stage.policy, step) as others,
        ):
            for callback in others:
                trainer.add_callback(callback)
            trainer.train(resume_from_checkpoint=resume)
        _save_whole(trainer, run.checkpoint(stage.policy))
    shutil.rmtree(partial, ignore_errors=True)


def _taught(session: Session) -> tuple[Train, list[Trajectory]]:
    """SFT's settings and the expert's successful episodes, in the order of its panel; of the user's file, all."""
    recipe, file = session.recipe, session.run.trajectories("expert")
    if not file.is_file():
        raise RunError(f"{file} is missing; run: perturn collect {session.run.folder}")
    episodes = [one for one in read_trajectories(file) if succeeded(one)]
    if recipe.expert is None or recipe.expert.file is None:
        order = {task.id: index for index, task in enumerate(session.panels.tasks["sft"])}
        taught = [one for one in episodes if one.task.id in order]
        episodes = sorted(taught, key=lambda one: (one.sample, order[one.task.id]))
    if not episodes:
        raise RunError(f"{file} holds no successful episode to teach.")
    assert recipe.sft is not None
    return recipe.sft, episodes


def _paired(session: Session, stage: Stage) -> tuple[Train, list[PreferencePair]]:
    """An alignment's settings and its pairs."""
    file = session.run.pairs(stage.mark)
    if not file.is_file():
        raise RunError(f"{file} is missing; run: perturn pair {session.run.folder}")
    assert session.recipe.align is not None
    return session.recipe.align, read_pairs(file)


def _facts(run: Run, stage: Stage) -> list[Path]:
    """Files that a training stage writes in `metrics/`."""
    rows = () if stage.name == "sft" else ("confidence", "reference")
    notes = () if stage.name == "sft" else ("loss", "agreement")
    files = [run.metrics(f"{name}{stage.mark}") for name in rows]
    return [run.metrics(stage.name), *files, *(run.metrics(f"{name}{stage.mark}", "json") for name in notes)]


def make_config(recipe: Recipe, settings: Train, output: Path, limit: int | None) -> TurnConfig:
    """A stage's settings -> the trainer's."""
    where = device()
    checkpointing: dict[str, Any] = {_CHECKPOINTING: settings.gradient_checkpointing}
    return TurnConfig(
        output_dir=str(output),
        loss=dict(settings.loss),
        credit=None if settings is recipe.sft or recipe.credit is None else dict(recipe.credit),
        max_length=recipe.model.max_length or limit,
        shared_prefix=settings.shared_prefix,
        chat_template=chat_template(recipe.model),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        token_budget=settings.token_budget,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_ratio,
        lr_scheduler_type=settings.scheduler,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        **checkpointing,
        bf16=compute_dtype(recipe.model.dtype, where) is torch.bfloat16,
        use_cpu=where.type == "cpu",
        save_steps=settings.save_steps,
        save_total_limit=1,
        logging_steps=1,
        report_to=[],  # trackers are opened for each stage, in the run folder
        run_name=f"{recipe.name}-{output.name.removesuffix('.partial')}",
        project=PROJECT,
        disable_tqdm=True,
        seed=recipe.seed,
    )


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end; what a kill left half-written is removed."""
    complete = []
    for checkpoint in folder.glob("checkpoint-*"):
        try:  # the trainer writes its state last
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            complete.append(checkpoint)
        except (OSError, ValueError):
            console.print(f"removing half-written {checkpoint}")
            shutil.rmtree(checkpoint)
    newest = max(complete, key=lambda checkpoint: int(checkpoint.name.rpartition("-")[2]), default=None)
    return str(newest) if newest else None


def count_tokens(examples: Examples) -> dict[str, int]:
    """Counts of the training data: tokens, those that carry loss, turns, and turns cut by the length limit."""
    found = [side for example in examples.rows for side in example.sides]
    return {
        "examples": len(examples),
        "tokens": sum(len(side.ids) for side in found),
        "loss_tokens": sum(turn >= 0 for side in found for turn in side.turn),
        "turns": sum(side.turns for side in found),
        "dropped_turns": sum(side.dropped_turns for side in found),
    }


def lora_config(settings: Lora) -> Any:
    """A stage's adapters -> peft's settings."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type="CAUSAL_LM",
    )


def _write_reference(run: Run, stage: Stage, trainer: TurnTrainer, settings: Mapping[str, Any]) -> None:
    """Keep what the reference says of each turn and token of the pairs, and the loss with its defaults.

    `metrics/confidence.jsonl` and `metrics/reference.jsonl` have a row a pair, in the order of `pairs.jsonl`.
    """
    assert isinstance(trainer.train_dataset, Examples)
    turns, tokens, ids = [], [], set[int]()
    for example in trainer.train_dataset.rows:
        noted = {
            name: _note_side(example, index)
            for index, name in zip(range(len(example.sides)), ("chosen", "rejected"), strict=False)
        }
        turns.append(json.dumps({name: found[0] for name, found in noted.items()}))
        tokens.append(json.dumps({name: found[1] for name, found in noted.items()}))
        ids.update(token for found in noted.values() for token in found[1]["ids"])
    write_whole(run.metrics(f"confidence{stage.mark}"), "\n".join(turns) + "\n")
    write_whole(run.metrics(f"reference{stage.mark}"), "\n".join(tokens) + "\n")
    loss: Any = trainer.loss
    known = json.dumps({**settings, **asdict(loss)}, indent=2)
    write_whole(run.metrics(f"loss{stage.mark}", "json"), known + "\n")
    note_tokens(run, ids, trainer.renderer.tokenizer)


def _note_agreement(run: Run, stage: Stage, trainer: TurnTrainer, pairs: Sequence[Any]) -> None:
    """Say how far the log-probabilities that the reference sampled its episodes with are from those just computed.

    The reference pass has computed them for training, so this costs nothing. Written to `metrics/agreement.json`.
    """
    assert isinstance(trainer.train_dataset, Examples)
    found = summary(
        differences(episode, side, logprobs)
        for pair, example in zip(pairs, trainer.train_dataset.rows, strict=True)
        for episode, side, logprobs in zip(
            (pair.chosen, pair.rejected), example.sides, example.reference, strict=True
        )
        if episode.policy.startswith(f"{stage.start}@")
    )
    if not found.tokens:
        return
    write_whole(run.metrics(f"agreement{stage.mark}", "json"), json.dumps(asdict(found), indent=2) + "\n")
    console.print(f"sampling and training differ by, over {found}")
    if found.median > _ROUNDING:
        console.print(
            "that is more than rounding explains: were the episodes sampled from other weights?",
            style="yellow",
        )


def _note_side(example: Example, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Confidence and weight of the turns of one side that carry loss, and the log-probabilities of their tokens."""
    side, logprobs = example.sides[index], example.reference[index]
    kept = [(token, turn) for token, turn in zip(side.ids, side.turn, strict=True) if turn != NO_TURN]
    turn = torch.tensor([turn for _, turn in kept])
    both = TurnLogprobs(logprobs, logprobs, turn, torch.zeros_like(turn))
    of_turns = {
        "turn": turn.unique_consecutive().tolist(),
        "confidence": [round(value, 6) for value in both.confidence().tolist()],
        "weight": [round(value, 6) for value in example.weight[index].tolist()],
    }
    of_tokens = {
        "ids": [token for token, _ in kept],
        "turn": turn.tolist(),
        "logprobs": [round(value, 4) for value in logprobs.tolist()],
    }
    return of_turns, of_tokens


def _save_whole(trainer: TurnTrainer, target: Path) -> None:
    """Save a plain model folder in one step; adapters are merged into the weights."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    with replacing(target, foreign=(Exception,)) as fresh:
        model.save_pretrained(fresh)
        trainer.renderer.tokenizer.save_pretrained(fresh)


class _Progress(TrainerCallback):
    """A bar on the screen, and the metrics in a file that survives a kill."""

    def __init__(self, run: Run, stage: str, what: str) -> None:
        self._run, self._file, self._what = run, run.metrics(stage), what
        self._open = ExitStack()

    def close(self) -> None:
        """Take the bar from the screen, also after an error."""
        self._open.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # After a resume, entries past the checkpoint will be made again.
        write_whole(self._file, "".join(json.dumps(entry) + "\n" for entry in state.log_history))
        self._run.expect(self._file, state.max_steps, state.global_step, "steps")
        self._bar = self._open.enter_context(bar(self._what, total=state.max_steps, done=state.global_step))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._bar.set(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is None or "train_runtime" in logs:  # the trainer's closing summary is no step
            return
        entry = {**logs, "step": state.global_step}
        append_line(self._file, json.dumps(entry))
        if not math.isfinite(entry.get("loss", 0.0)):
            raise RunError(
                f"the loss is {entry['loss']} at step {state.global_step}; lower the learning rate."
            )
