"""Say what to change if a training needs more GPU memory than there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perturn.errors import ModelError
from perturn.training.turn_config import TurnConfig


@contextmanager
def memory_remedies(args: TurnConfig) -> Iterator[None]:
    """Turn an out-of-memory error of a training into an error that names settings which need less memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if args.auto_find_batch_size:  # accelerate tries a smaller batch
            raise
        first = "" if args.gradient_checkpointing else "gradient_checkpointing=true, "
        raise ModelError(
            f"the GPU has too little memory to train: {str(error).partition('. ')[0]}. Set {first}a smaller "
            f"token_budget (it is {args.token_budget}), LoRA, or FSDP2 on several GPUs. If a recipe's engine is open "
            "on this GPU, set a smaller engine.cache_gigabytes, or let vLLM sleep (engine.sleep=true)."
        ) from error
