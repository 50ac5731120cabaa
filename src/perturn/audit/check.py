"""The audit of a dataset or a run: lengths, duplicates, template problems, and what is dropped, cut or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perturn.audit.rows import read_each
from perturn.audit.view import recipe_of, view_of
from perturn.data.outcomes import succeeded
from perturn.data.pairs import pair_with_expert
from perturn.data.run_files import Confidences, read_sides
from perturn.data.store import read_trajectories
from perturn.errors import DataError, ModelError
from perturn.policy.examples import Example, encode_example
from perturn.policy.names import load_config
from perturn.policy.tokens import NO_TURN, Renderer
from perturn.settings.recipe import Recipe
from perturn.types import Action, PreferencePair, Trajectory

Row = Trajectory | PreferencePair
_EXAMPLES = 5
"""Examples listed of each kind of finding."""


def audit(
    data: Path, model: str, max_length: int | None = None, chat_template: str | None = None
) -> dict[str, Any]:
    """Examine data as training would see it, without training.

    Args:
        data: JSONL file, or a run folder: its expert trajectories and its pairs, recorded or as they would be made.
        model: Whose tokenizer, chat template and context length count.
        max_length: Length limit in tokens; None: the model's own.
        chat_template: Name, file or Jinja; None: the run's, else the tokenizer's own.

    Raises:
        PerturnError: If nothing can be read, or there is no such model.
    """
    context = _context(model)
    recipe = recipe_of(data)
    if recipe:
        max_length = max_length or recipe.model.max_length
    parts, pairing = (_run_parts(data, recipe), _pairing(data, recipe)) if recipe else ({"rows": data}, None)
    found: dict[str, Any] = {
        "data": str(data),
        "model": model,
        "max_length": max_length,
        "context": context,
        "parts": {},
        "refused": [],
        "template": {"problems": [], "control_tokens": [], "not_as_sampled": 0},
    }
    try:
        view = view_of(data, model, max_length=max_length, chat_template=chat_template)
    except ModelError as error:
        found["template"]["problems"].append(str(error))
        return found
    for name, file in parts.items():
        part = _Part(name, view.renderer, view.max_length or context, view.shared_prefix)
        for number, row in read_each(file):
            part.add(number, row)
        found["parts"][name] = part.summary()
        found["refused"] += part.refused
        found["template"]["control_tokens"] += part.control_tokens[:_EXAMPLES]
        found["template"]["not_as_sampled"] += part.not_as_sampled
    if pairing is not None:
        found["pairing"] = pairing
    if recipe:
        found |= {"tasks": _tasks(data)} | ({"weights": weights} if (weights := _weights(data)) else {})
    return found


@dataclass
class _Part:
    """One file's rows, as training would see them."""

    name: str
    renderer: Renderer
    limit: int | None
    shared_prefix: str
    examples: list[Example] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    control_tokens: list[dict[str, Any]] = field(default_factory=list)
    not_as_sampled: int = 0

    def add(self, number: int, row: Row | DataError) -> None:
        """Take in one row, or note why training would refuse it."""
        try:
            if isinstance(row, DataError):
                raise row
            self._check_text(number, row)
            self.examples.append(encode_example(row, self.renderer, self.limit, self.shared_prefix))
            self.numbers.append(number)
        except (DataError, ModelError) as error:
            self.refused.append({"part": self.name, "row": number, "reason": str(error)})

    def _check_text(self, number: int, row: Row) -> None:
        """Look for text that the tokenizer reads as control tokens, and for actions that are not what was sampled."""
        special = {token for token in self.renderer.tokenizer.all_special_tokens if token.strip()}
        for side in _sides(row):
            for index, turn in enumerate(side.turns):
                found = [token for token in special if token in turn.observation_text]
                if found:
                    self.control_tokens.append(
                        {"part": self.name, "row": number, "turn": index, "tokens": found}
                    )
                self.not_as_sampled += not self._is_as_sampled(turn.action)

    def _is_as_sampled(self, action: Action) -> bool:
        """Whether an action's text is what its token ids say."""
        if action.token_ids is None or action.tool_calls:
            return True
        text = self.renderer.tokenizer.decode(list(action.token_ids), skip_special_tokens=True)
        return bool(text.strip() == action.text.strip())

    def summary(self) -> dict[str, Any]:
        """Counts, lengths, duplicates, cuts."""
        sides = [side for example in self.examples for side in example.sides]
        cut = [
            number
            for number, example in zip(self.numbers, self.examples, strict=True)
            if any(side.dropped_turns for side in example.sides)
        ]
        return {
            "rows": len(self.examples) + len(self.refused),
            "usable": len(self.examples),
            "trajectories": len(sides),
            "turns": sum(side.turns for side in sides),
            "tokens": sum(len(side.ids) for side in sides),
            "loss_tokens": sum(turn != NO_TURN for side in sides for turn in side.turn),
            "lengths": {
                "tokens": _spread([len(side.ids) for side in sides]),
                "turns": _spread([side.turns for side in sides]),
                "tokens_of_a_turn": _spread(_turn_lengths(self.examples)),
            },
            "duplicates": self._duplicates(),
            "cut": {
                "trajectories": sum(side.dropped_turns > 0 for side in sides),
                "turns": sum(side.dropped_turns for side in sides),
                "limit": self.limit,
                "rows": cut[:_EXAMPLES],
            },
        }

    def _duplicates(self) -> dict[str, Any]:
        """Rows that are the same tokens, and chosen sides that several rows share."""
        first: dict[tuple[tuple[int, ...], ...], int] = {}
        rows = []
        for number, example in zip(self.numbers, self.examples, strict=True):
            key = tuple(tuple(side.ids) for side in example.sides)
            if first.setdefault(key, number) != number:
                rows.append([first[key], number])
        chosen = Counter(tuple(each.chosen.ids) for each in self.examples if each.rejected is not None)
        return {
            "rows": len(rows),
            "examples": rows[:_EXAMPLES],
            "chosen_used_again": sum(count - 1 for count in chosen.values()),
        }


def _sides(row: Row) -> Iterator[Trajectory]:
    yield from (row,) if isinstance(row, Trajectory) else (row.chosen, row.rejected)


def _turn_lengths(examples: Sequence[Example]) -> list[int]:
    """Loss tokens of every turn."""
    return [
        count
        for example in examples
        for side in example.sides
        for turn, count in Counter(side.turn).items()
        if turn != NO_TURN
    ]


def _spread(values: Sequence[int]) -> dict[str, float]:
    """Least, median, upper quantiles, most; empty if there is no value."""
    if not values:
        return {}
    points = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(values, at)) for name, at in points.items()}


def _context(model: str) -> int | None:
    """Longest sequence the model was made for; its weights are not read."""
    limit = getattr(load_config(model).get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def _run_parts(run: Path, recipe: Recipe) -> dict[str, Path]:
    """Expert trajectories and pairs that the run trains on, as far as they are there."""
    parts = {"expert": run / "trajectories" / "expert.jsonl", "pairs": run / "pairs.jsonl"}
    found = {name: file for name, file in parts.items() if file.is_file()}
    if not found:
        raise DataError(f"{run} has no data yet; run: perturn collect {run}")
    return found


def _pairing(run: Path, recipe: Recipe) -> dict[str, int] | None:
    """Number of explored trajectories by outcome of pairing, under the recipe's settings."""
    files = [run / "trajectories" / f"{name}.jsonl" for name in ("expert", "explore")]
    if recipe.pair is None or not all(file.is_file() for file in files):
        return None
    experts, explored = (list(read_trajectories(file)) for file in files)
    _, reasons = pair_with_expert(
        [one for one in experts if succeeded(one)],
        sorted(explored, key=lambda one: one.key),
        recipe.pair.threshold,
        max_extra_turns=recipe.pair.max_extra_turns,
    )
    return dict(reasons)


def _tasks(run: Path) -> dict[str, int]:
    """Expert episodes that SFT leaves out, and evaluated tasks that were trained on."""
    seen: dict[str, set[str]] = {"train": set(), "evaluate": set()}
    unsuccessful = 0
    for name in ("expert", "explore"):
        file = run / "trajectories" / f"{name}.jsonl"
        for one in read_trajectories(file) if file.is_file() else ():
            seen["train"].add(one.task.id)
            unsuccessful += name == "expert" and not succeeded(one)
    for file in (run / "evaluation").glob("*.jsonl"):
        seen["evaluate"] |= {one.task.id for one in read_trajectories(file)}
    return {
        "unsuccessful_expert": unsuccessful,
        "evaluated_and_trained": len(seen["train"] & seen["evaluate"]),
    }


def _weights(run: Path) -> dict[str, dict[str, float]] | None:
    """Turn weights and confidences that the alignment has recorded, by side."""
    file = run / "metrics" / "confidence.jsonl"
    if not file.is_file():
        return None
    rows = read_sides(file, Confidences)
    found = {}
    for side in ("chosen", "rejected"):
        weights = [weight for row in rows for weight in row[side]["weight"]]
        confidences = [value for row in rows for value in row[side]["confidence"]]
        found[side] = {
            "turns": len(weights),
            "mean_confidence": float(np.mean(confidences)),
            "mean_weight": float(np.mean(weights)),
            "highest_weight_share": float(np.mean(np.isclose(weights, max(weights)))),
        }
    return found
