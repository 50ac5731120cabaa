"""Training in this process: models are loaded, trained by `TurnTrainer` and saved whole."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perturn.chat.model_names import load_tokenizer
from perturn.chat.word_tokenizer import learn
from perturn.config.sections import Lora
from perturn.display.progress_bars import console
from perturn.io.atomic_write import replacing
from perturn.policy.adapters import lora_config
from perturn.policy.models import load_model
from perturn.training.turn_trainer import TurnTrainer


class LocalTraining:
    """Trains policies that are folders of weights."""

    def begin(
        self, start: str, told: Sequence[str], seed: int, lora: Lora | None, resumes: bool
    ) -> tuple[Any, Any]:
        """Load the policy; the trainer loads an optimizer that goes on."""
        model, tokenizer = load_model(start, say=console.print), load_tokenizer(start)
        if told:
            learn(model, tokenizer, tuple(told), seed)
        return model, tokenizer

    def trainer(self, model: Any, reference: str | None, lora: Lora | None, **settings: Any) -> TurnTrainer:
        """Return the trainer of a loaded model."""
        return TurnTrainer(model, ref_model=reference, peft_config=lora and lora_config(lora), **settings)

    def save(self, trainer: TurnTrainer, target: Path, with_optimizer: bool) -> None:
        """Save a plain model folder in one step; adapters are merged into the weights."""
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        with replacing(target, foreign=(Exception,)) as fresh:
            model.save_pretrained(fresh)
            trainer.renderer.tokenizer.save_pretrained(fresh)
            if with_optimizer:
                trainer._save_optimizer_and_scheduler(str(fresh))

    def keep(self, start: str, target: Path, lora: Lora | None, optimizer: Sequence[Path]) -> None:
        """Save the policy again, with its optimizer."""
        with replacing(target, foreign=(Exception,)) as fresh:
            load_model(start, say=console.print).save_pretrained(fresh)
            load_tokenizer(start).save_pretrained(fresh)
            for file in optimizer:
                shutil.copy2(file, fresh)

    def close(self) -> None:
        """Release nothing."""
