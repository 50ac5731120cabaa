"""Say what to change if a training needs more GPU memory than there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perturn.errors import ModelError


@contextmanager
def memory_remedies(token_budget: int, checkpointing: bool) -> Iterator[None]:
    """Turn an out-of-memory error of a training step into an error that names settings which need less memory.

    Args:
        token_budget: Largest number of tokens of a pass.
        checkpointing: Whether activations are computed again in the backward pass.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = "" if checkpointing else "gradient_checkpointing=true, "
        raise ModelError(
            f"the GPU has too little memory for a training step: {str(error).partition('. ')[0]}. Set {first}a smaller "
            f"token_budget (it is {token_budget}), lora, or launch.sharding=fsdp2 on several GPUs. If an engine is open "
            "on this GPU, give it a smaller cache (engine.cache_gigabytes), or let vLLM sleep (engine.sleep=true)."
        ) from error
