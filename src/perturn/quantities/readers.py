"""Open policies that quantities are read of, and episodes as their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.config.sections import TOKEN_BUDGET
from perturn.policy.examples import Example
from perturn.policy.logprobs import prepare
from perturn.policy.models import device, load_model
from perturn.quantities.protocol import ACTED, Source
from perturn.types import Trajectory


@dataclass(frozen=True)
class Reader:
    """An open policy that quantities are read of."""

    model: Any
    """A transformers model, prepared for that."""
    renderer: Renderer
    """Conversation -> tokens, for the model."""
    token_budget: int
    """Tokens of one pass."""


def open_reader(
    model: Any, tokenizer: Any = None, template: str | None = None, token_budget: int = TOKEN_BUDGET
) -> Reader:
    """Open a policy.

    Args:
        model: A name, a folder, or a transformers model.
        tokenizer: Of the model; None: the tokenizer of its name.
        template: Jinja chat template to use instead of the tokenizer's own.
        token_budget: Tokens of one pass.
    """
    if isinstance(model, str | Path):
        tokenizer = tokenizer or load_tokenizer(str(model))
        model = load_model(str(model)).to(device())
    prepare(model)
    return Reader(model, Renderer(tokenizer, template), token_budget)


class Models(Source):
    """Models that are given, for quantities of episodes that are in memory."""

    def __init__(self, readers: Mapping[str, Reader], form: str = "") -> None:
        """Hold them.

        Args:
            readers: Open policies by role; a role without one is filled by the policy that acted.
            form: Text of a turn that gives an answer, with `{answer}` where that stands.
        """
        self._readers, self._form = readers, form

    def policy(self, role: str) -> Reader:
        """Return the policy that has a role."""
        return self._readers[role if role in self._readers else ACTED]

    def answer_form(self) -> str:
        """Return the text of a turn that gives an answer."""
        return self._form


def encoded(trajectories: Sequence[Trajectory], renderer: Renderer) -> dict[int, Example]:
    """Return the trajectories that have turns as tokens, by index."""
    return {
        i: Example(renderer.encode(one, every_turn=True), trajectories=(one,), whole=(one,))
        for i, one in enumerate(trajectories)
        if one.turns
    }


def in_order(rows: Iterable[int], trajectories: Sequence[Trajectory]) -> list[int]:
    """Return indices by task, sample and policy, so that the order of the episodes changes no fold."""
    return sorted(rows, key=lambda i: (trajectories[i].key, trajectories[i].policy))
