"""A policy with its weights in this process, for the engines that need them."""

from __future__ import annotations

from collections.abc import Callable

from perturn.engines import Loaded
from perturn.policy.models import compute_dtype, context_length, device, load_model, weights_digest
from perturn.policy.names import load_tokenizer
from perturn.policy.tokens import Renderer


def load_policy(
    path: str, *, policy: str, dtype: str, template: str | None, say: Callable[[str], None]
) -> Loaded:
    """Load a policy.

    Args:
        path: Folder or Hub id.
        policy: Its name in the run.
        dtype: The setting `model.dtype`.
        template: Text of the chat template, if it is not the tokenizer's own.
        say: Told what is done before anything slow starts.
    """
    where = device()
    kind = compute_dtype(dtype, where)
    model = load_model(path, dtype=kind, say=say)
    return Loaded(
        model=model,
        tokens=Renderer(load_tokenizer(path), template),
        name=f"{policy}@{weights_digest(model)[:12]}",
        device=where.type,
        dtype=str(kind).removeprefix("torch."),
        context=context_length(model),
    )
