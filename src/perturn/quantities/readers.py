"""Loaded policies for the computation of quantities, and episodes encoded as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.config.sections import TOKEN_BUDGET
from perturn.policy.examples import Example
from perturn.policy.logprobs import prepare
from perturn.policy.models import compute_dtype, device, load_model
from perturn.policy.reference import Precision
from perturn.quantities.protocol import ACTED, Source
from perturn.types import Trajectory


@dataclass(frozen=True)
class Reader:
    """Loaded policy, ready for forward passes."""

    model: Any
    """Transformers model, prepared for packed sequences."""
    renderer: Renderer
    """Renderer of conversations to tokens, for the model."""
    token_budget: int
    """Maximum number of tokens of one pass."""
    precision: Precision = nullcontext
    """Precision of the passes, for `frozen`."""


def open_reader(
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
    dtype: str = "auto",
) -> Reader:
    """Load a policy for forward passes.

    On a GPU, a model that is given by its name computes in the precision of training, else in float32.

    Args:
        model: Name or folder of a model, or a transformers model.
        tokenizer: Tokenizer of the model; None: load it by the model's name.
        template: Jinja chat template to use; None: the template of the tokenizer.
        token_budget: Maximum number of tokens of one pass.
        dtype: The setting `model.dtype`.
    """
    precision: Precision = nullcontext
    if isinstance(model, str | Path):
        tokenizer = tokenizer or load_tokenizer(str(model))
        where = device()
        model = load_model(str(model)).to(where)
        if where.type == "cuda":
            precision = partial(torch.autocast, "cuda", compute_dtype(dtype, where, model.config))
    prepare(model)
    return Reader(model, Renderer(tokenizer, template), token_budget, precision)


class Models(Source):
    """Source of quantities with loaded models, for episodes in memory."""

    def __init__(self, readers: Mapping[str, Reader], form: str = "") -> None:
        """Make a source.

        Args:
            readers: Role -> loaded policy. A missing role is filled by the policy with the role `acted`.
            form: Text of a turn that gives an answer, with `{answer}` in the place of the answer.
        """
        self._readers, self._form = readers, form

    def policy(self, role: str) -> Reader:
        """Return the policy with a role."""
        return self._readers[role if role in self._readers else ACTED]

    def answer_form(self) -> str:
        """Return the text of a turn that gives an answer, with `{answer}` in the place of the answer."""
        return self._form


def encoded(trajectories: Sequence[Trajectory], renderer: Renderer) -> dict[int, Example]:
    """Return the trajectories as tokens, by index; trajectories without turns are left out."""
    return {
        i: Example(renderer.encode(one, every_turn=True), trajectories=(one,), whole=(one,))
        for i, one in enumerate(trajectories)
        if one.turns
    }


def in_order(rows: Iterable[int], trajectories: Sequence[Trajectory]) -> list[int]:
    """Sort indices by task, sample and policy of their episodes, so the order of the episodes changes no fold."""
    return sorted(rows, key=lambda i: (trajectories[i].key, trajectories[i].policy))
