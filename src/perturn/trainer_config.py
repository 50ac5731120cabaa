"""TurnConfig: the settings of `TurnTrainer`, those of transformers and ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from perturn.errors import ConfigError
from perturn.policy.examples import SHARED_PREFIX


@dataclass
class TurnConfig(TrainingArguments):
    """Settings of `TurnTrainer`: those of `TrainingArguments`, and a loss."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "loss",
    ]

    loss: dict[str, Any] | str | None = field(
        default_factory=lambda: {"name": "tlm-dre"},
        metadata={"help": "Name and settings of a loss, such as {'name': 'tlm-dre', 'kernel': 'ukl'}."},
    )
    max_length: int | None = field(
        default=None,
        metadata={"help": "Longest sequence in tokens; whole turns are dropped from the end. None: never."},
    )
    token_budget: int = field(
        default=4096,
        metadata={
            "help": "Tokens that go through the model together, counted after sharing. It bounds memory: the rows of "
            "a batch are divided into as many passes as they need. It does not change the loss."
        },
    )
    shared_prefix: str = field(
        default="keep",
        metadata={
            "help": "Turns with which both sides of a pair begin: keep them in the loss, or mask them."
        },
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja chat template to use instead of the tokenizer's own."}
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Train without the model's dropout, as the reference ran; adapters keep theirs."},
    )
    reference_cache: str | None = field(
        default=None, metadata={"help": "Folder for reference log-probabilities. None: the user's cache."}
    )
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    logging_steps: float = field(default=10, metadata={"help": "Optimizer steps between log entries."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide losses that are not finite."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Not used: rows are examples."})

    def __post_init__(self) -> None:
        """Check what can be checked without data."""
        if isinstance(self.loss, str) and not self.loss.startswith("{"):
            self.loss = {"name": self.loss}
        super().__post_init__()  # type: ignore[no-untyped-call]
        if not torch.accelerator.is_available():  # pinned memory speeds copies to one
            self.dataloader_pin_memory = False
        if self.accelerator_config.dispatch_batches:  # type: ignore[union-attr]
            raise ConfigError(
                "accelerator_config.dispatch_batches must be off, got True; each process reads and packs its own rows."
            )
        if self.token_budget < 1:
            raise ConfigError(f"token_budget must be >= 1, got {self.token_budget}.")
        if self.shared_prefix not in SHARED_PREFIX:
            raise ConfigError(
                f"shared_prefix must be one of {', '.join(SHARED_PREFIX)}, got {self.shared_prefix!r}."
            )


def loss_section(loss: dict[str, Any] | str | None) -> dict[str, Any]:
    """The `loss` setting as a section.

    Raises:
        ConfigError: If it names no loss.
    """
    if not isinstance(loss, dict) or "name" not in loss:
        raise ConfigError(f"loss must name a loss, such as {{'name': 'tlm-dre'}}, got {loss!r}.")
    return loss
