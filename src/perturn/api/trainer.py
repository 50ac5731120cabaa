"""Train models on rows without a run folder; models and rows are Python objects."""

from __future__ import annotations

import copy
import shutil
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sized
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal, cast

import torch
from transformers import SchedulerType
from transformers.trainer_callback import PrinterCallback

from perturn.api.arguments import check_rows
from perturn.chat.model_names import tokenizer_of
from perturn.chat.tokens import Renderer
from perturn.episodes.seeds import seed_of
from perturn.errors import check_belongs, check_fit
from perturn.policy.packing import Examples
from perturn.run.iteration_state import continue_training
from perturn.training.credit_choice import loss_and_credit
from perturn.training.turn_config import TurnConfig, section
from perturn.training.turn_trainer import TurnTrainer


def train(
    model: Any,
    rows: Iterable[Any],
    *,
    loss: str | dict[str, Any] = "tlm-dre",
    credit: str | dict[str, Any] | None = None,
    tokenizer: Any = None,
    ref_model: Any = None,
    peft_config: Any = None,
    **settings: Any,
) -> Any:
    """Train a policy and return it. `TurnTrainer` does the same with all options of a transformers `Trainer`.

    Args:
        model: Hub id or folder, or a transformers model, which is trained in place.
        rows: Pairs or trajectories, in Perturn's format or TRL's.
        loss: Name of a loss, or a section `loss`.
        credit: Name of a credit, or a section `credit`; None: the credit of the loss's paper.
        tokenizer: Tokenizer; None: the model's own.
        ref_model: Reference policy; None: the model before this training.
        peft_config: Configuration of adapters to train; None: train all weights.
        settings: Further settings of `TurnConfig`. Without `output_dir`, nothing is saved.

    Returns:
        The trained model, in evaluation mode.
    """
    check_rows(rows)
    with ExitStack() as ended:
        if "output_dir" not in settings:
            settings = _unsaved(ended.enter_context(TemporaryDirectory(prefix="perturn-"))) | settings
        trainer = TurnTrainer(
            model,
            TurnConfig(loss=loss, credit=credit, **settings),
            train_dataset=rows,
            processing_class=tokenizer,
            ref_model=ref_model,
            peft_config=peft_config,
        )
        trainer.train()
    assert trainer.model is not None
    return trainer.model.eval()


def _unsaved(folder: str) -> dict[str, Any]:
    """Return settings with which training saves nothing."""
    return {"output_dir": folder, "save_strategy": "no", "report_to": "none"}


_ENDLESS = 1_000_000
"""Number of iterations of a schedule whose length does not matter."""


class Trainer:
    """Trains a policy in iterations with new rows each time, as a run with `align.minibatches` does.

    The model, the optimizer state and the learning-rate schedule continue from one iteration to the next. With a
    `chat_template`, give `collect` and `evaluate` the trainer's `tokenizer`, so that rollouts use this template too.

    ```python
    trainer = perturn.Trainer(model, loss="ppo-clip", learning_rate=1e-5)
    for iteration in range(1, 11):
        episodes = perturn.collect(trainer.model, MyWorld, samples=4, iteration=iteration)
        print(trainer.train(perturn.weigh(episodes, "rloo")))
    ```
    """

    def __init__(
        self,
        model: Any,
        *,
        loss: str | dict[str, Any] = "tlm-dre",
        credit: str | dict[str, Any] | None = None,
        tokenizer: Any = None,
        ref_model: Any = None,
        reference: Literal["previous", "start"] = "previous",
        minibatches: int = 1,
        epochs: int = 1,
        iterations: int | None = None,
        seed: int = 0,
        peft_config: Any = None,
        **settings: Any,
    ) -> None:
        """Check the settings. Nothing is trained yet.

        Args:
            model: Hub id or folder, or a transformers model, which is trained in place.
            loss: Name of a loss, or a section `loss`.
            credit: Name of a credit, or a section `credit`, for rows without weights; None: the credit of the loss's
                paper.
            tokenizer: Tokenizer; None: the model's own.
            ref_model: Reference policy of all iterations; None: see `reference`.
            reference: Reference policy if `ref_model` is None. `previous`: the policy at the start of the iteration.
                `start`: the policy at the start of the first iteration.
            minibatches: Largest number of optimizer steps per epoch.
            epochs: Number of passes over the rows of an iteration.
            iterations: Number of iterations that the learning-rate schedule covers; None: constant learning rate, after
                a warm-up if `warmup_steps` is set, which counts the steps of all iterations.
            seed: Seed of the order of rows and of new adapters. Each iteration has its own order.
            peft_config: Configuration of adapters to train; None: train all weights.
            settings: Further settings of `TurnConfig`.

        Raises:
            ConfigError: If a setting is wrong.
        """
        numbers = {
            "minibatches": minibatches,
            "epochs": epochs,
            "iterations": 1 if iterations is None else iterations,
        }
        _check_settings(numbers, reference, settings)
        self.model, self.tokenizer, self.iteration = model, tokenizer, 0
        self._folder = mkdtemp(prefix="perturn-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._state: Path | None = None
        self._reference, self._adapters, self._seed = ref_model, peft_config, seed
        if ref_model is None and reference == "start":
            self._reference = model if isinstance(model, str | Path) else copy.deepcopy(model).eval()
        self._minibatches, self._epochs, self._iterations = minibatches, epochs, iterations
        steady = {} if iterations else {"lr_scheduler_type": "constant_with_warmup"}
        quiet = {"logging_steps": 1, "disable_tqdm": True, **_unsaved(self._folder)}
        self._settings = {"loss": loss, "credit": credit, **steady, **quiet, **settings}
        config = self._config()
        if iterations is None:
            _refuse_schedule(config)
        credit_section = None if config.credit is None else section(config.credit, "credit")
        loss_and_credit(section(config.loss, "loss"), credit_section)
        if not isinstance(model, str | Path) or config.chat_template is not None:
            self.tokenizer = _tokenizer(model, tokenizer, config.chat_template)

    def _config(self) -> TurnConfig:
        """Return the training settings of the current iteration."""
        seed = self._seed if self.iteration <= 1 else seed_of(self._seed, "align", self.iteration)
        return TurnConfig(num_train_epochs=self._epochs, seed=seed, **self._settings)

    def train(self, rows: Iterable[Any]) -> dict[str, float]:
        """Train on the rows of one iteration.

        Neither the policy nor the optimizer changes if there are no rows, or if all weights are 0 and the loss reads
        nothing else: no reference policy and no token inputs.

        Args:
            rows: Pairs or trajectories, as `weigh` and `make_rows` return them.

        Returns:
            Metric, such as `loss` -> its average over the optimizer steps; empty if nothing changes.

        Raises:
            ConfigError: If a setting is wrong, or the schedule of `iterations` is over.
            DataError: If a row cannot be trained on.
        """
        check_rows(rows)
        check_fit(
            not isinstance(rows, str), "rows", "be rows, not a path", rows, "perturn.train takes a path."
        )
        rows = rows if isinstance(rows, Sized) else list(rows)  # a datasets.Dataset marks its nulls
        self.iteration += 1
        if not len(rows):
            return {}
        args = self._config()
        iterations = self._iterations or _ENDLESS
        continue_training(args, len(rows), self._minibatches, self._epochs, iterations, self._state)
        trainer = TurnTrainer(
            self.model,
            args,
            train_dataset=rows,
            processing_class=self.tokenizer,
            ref_model=self._reference,
            peft_config=self._adapters,
        )
        assert trainer.model is not None
        self.model, self.tokenizer, self._adapters = trainer.model.eval(), trainer.renderer.tokenizer, None
        weights = (side for example in cast(Examples, trainer.train_dataset).rows for side in example.weight)
        traits = trainer.loss.traits
        if not (traits.needs_reference or traits.reads or any(map(torch.any, weights))):
            return {}  # the optimizer's momentum would still move the policy
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        self.model = trainer.model.eval()
        self._state = Path(self._folder) / "state"
        self._state.mkdir(exist_ok=True)
        trainer._save_optimizer_and_scheduler(str(self._state))
        return _means(trainer.state.log_history)


def _tokenizer(model: Any, given: Any, chat_template: str | None) -> Any:
    """Return the tokenizer of a model, with the chat template of its training."""
    own = tokenizer_of(str(model) if isinstance(model, Path) else model, given)
    return own if chat_template is None else Renderer(own, chat_template).tokenizer


def _check_settings(numbers: Mapping[str, int], reference: str, settings: Mapping[str, Any]) -> None:
    """Reject settings of a `Trainer` that are out of range, or that the `Trainer` sets itself."""
    for name, number in numbers.items():
        check_fit(isinstance(number, int) and number >= 1, name, "be >= 1 and whole", number)
    check_fit(reference in ("previous", "start"), "reference", "be previous or start", reference)
    own = ("num_train_epochs", "output_dir", "per_device_train_batch_size")
    remedy = "give minibatches= and epochs=, and save trainer.model"
    check_belongs({name: name in settings for name in own}, False, "Trainer itself", remedy)


def _refuse_schedule(config: TurnConfig) -> None:
    """Reject a learning-rate schedule that depends on the number of iterations."""
    remedy, name = "Or set iterations.", SchedulerType(config.lr_scheduler_type).value
    must = "be constant or constant_with_warmup without iterations"
    check_fit(name.startswith("constant"), "lr_scheduler_type", must, name, remedy)
    steps, must = config.warmup_steps, "be a number of steps without iterations"
    check_fit(not 0 < steps < 1, "warmup_steps", must, steps, remedy)


def _means(entries: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the average of each metric over the optimizer steps; entries on the whole training are skipped."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in entries:
        if "loss" in entry:
            for name, number in entry.items():
                found[name].append(number)
    return {name: sum(each) / len(each) for name, each in found.items() if name not in ("epoch", "step")}
