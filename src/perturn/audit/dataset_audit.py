"""Audit a dataset or a run: lengths, duplicates, template problems, dropped turns and rejected rows."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from perturn.audit.agent_traffic import Traffic
from perturn.audit.audit_text import refused
from perturn.audit.training_view import View, credit_file, recipe_of, totals, view_of
from perturn.chat.model_names import load_config
from perturn.chat.tokens import NO_TURN, Encoded, silent_turns
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import RowInputs, RowMaker, RowTraits
from perturn.config.stages import makes
from perturn.data.episode_outcomes import read_tasks
from perturn.data.group_account import read_credits
from perturn.data.run_files import Confidences, read_sides
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.episodes.calls.call import Tools
from perturn.episodes.tool_calls import understand
from perturn.errors import DataError, ModelError
from perturn.formats.json_stream import Record
from perturn.formats.read_rows import (
    Row,
    Tally,
    notes_on,
    open_rows,
    own_row,
    read_branches,
    read_each,
    sides_of,
)
from perturn.formats.row_sources import Source
from perturn.formats.trl_rows import describe_unread
from perturn.policy.examples import Example, count_changes, count_unknown, encode_example, notes_on_changes
from perturn.rotary import trainable_length
from perturn.table import locate
from perturn.types import Action, Trajectory, failed, succeeded

_EXAMPLES = 5
"""Number of examples that are listed for each kind of finding."""
_LENGTHS = ("tokens", "turns", "tokens_of_a_turn")
"""Names of the measured lengths: tokens of each sequence, turns of each side, and loss tokens of each turn."""


def audit(
    data: Path,
    model: str,
    max_length: int | None = None,
    chat_template: str | None = None,
    loss_name: str | None = None,
) -> dict[str, Any]:
    """Examine training data as training would read it, without training.

    Args:
        data: Rows from any source, or a run folder. From a run, the recorded training rows are read: expert
            trajectories, pairs, explored groups and outcomes.
        model: Model whose tokenizer, chat template and context length are used.
        max_length: Length limit in tokens. None: the run's limit, or else the model's context length.
        chat_template: Name, file or Jinja text of a chat template. None: the run's chat template, or else the
            tokenizer's.
        loss_name: Loss that would train on the rows; rows that it cannot read are rejected. It does not apply to the
            expert episodes of a run. None: rows of every kind are accepted.

    Raises:
        PerturnError: If the data cannot be read, or the model or the loss does not exist.
    """
    loss = locate("perturn.training.credit_choice:make_loss")({"name": loss_name}) if loss_name else None
    context = trainable_length(load_config(model))
    run, recipe = RunPaths(data), recipe_of(data)
    parts = _files_of(run, recipe) if recipe else {"rows": data}
    max_length = max_length or (recipe.model.max_length if recipe else None)
    template: dict[str, Any] = {
        "problems": [],
        "control_tokens": [],
        "texts_with_control_tokens": 0,
        "not_as_sampled": 0,
    }
    found: dict[str, Any] = {
        "data": str(data),
        "model": model,
        "max_length": max_length,
        "context": context,
        "parts": {},
        "usable": 0,
        "refused": [],
        "template": template,
    }
    try:
        view = view_of(data, model, loss_name, max_length, chat_template)
    except ModelError as error:
        template["problems"].append(str(error))
        return found
    if view.branches:
        parts["branches"] = view.branches
    bins = _bins_of(data, view)
    for name, file in parts.items():
        part = _audited(name, file, view, view.max_length or context, loss, bins)
        found["parts"][name] = part.summary()
        found["refused"] += part.refused
        template["control_tokens"] += part.control_tokens[:_EXAMPLES]
        template["texts_with_control_tokens"] += len(part.control_tokens)
        template["not_as_sampled"] += part.not_as_sampled
    found["usable"] = sum(part["usable"] for part in found["parts"].values())
    return found | (_run_facts(run, recipe.rows) if recipe else {})


def _bins_of(data: Path, view: View) -> dict[tuple[str, int], str]:
    """Return the bin of each episode of a run's groups; `trained` too if it counts only in a KL term of the loss."""
    file = credit_file(data, view)
    if file is None or not file.is_file():
        return {}
    loss = locate("perturn.training.credit_choice:make_loss")(view.loss)
    kept = {"no_spread"} if loss.traits.needs_reference else set()
    return {row.key: "trained" if row.bin in kept and row.weight else row.bin for row in read_credits(file)}


def _audited(
    name: str, file: Path, view: View, limit: int | None, loss: Any, bins: Mapping[tuple[str, int], str]
) -> _Part:
    """Return the audit of a file; the arguments are fields of `_Part`. Expert episodes may suit no other loss."""
    of_expert = name == "expert"
    part = _Part(name, view, limit, open_rows(file), None if of_expert else loss, {} if of_expert else bins)
    for record, row in (read_branches if name == "branches" else read_each)(part.source, part.tally):
        part.add(record, row)
    return part


def _files_of(run: RunPaths, recipe: Recipe) -> dict[str, Path]:
    """Return the row files of a run, by the name of each part."""
    parts = {"expert": run.trajectories("expert"), "pairs": run.pairs(run.mark)}
    if makes(recipe, "groups"):
        parts["explored"] = run.trajectories(f"explore{run.mark}")
    if makes(recipe, "single", "labelled"):
        parts["outcomes"] = run.outcomes(run.mark)
    there = {name: file for name, file in parts.items() if file.is_file()}
    if not there:
        raise DataError(f"{run.folder} has no data yet; run: perturn collect {quote(str(run.folder))}")
    return there


@dataclass
class _Part:
    """Audit of the rows of one file."""

    name: str
    view: View
    limit: int | None
    source: Source
    loss: Any
    """Loss that must be able to read the rows; None: any."""
    bins: Mapping[tuple[str, int], str]
    """Bin of each episode of a run's groups; empty for other data, or before the run has weighed them."""
    counts: Counter[str] = field(default_factory=Counter)
    """Sums over usable rows: `usable`, the keys of `totals`, `unknown`, and `cut` trajectories and `dropped` turns."""
    lengths: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _LENGTHS})
    changes: Counter[str] = field(default_factory=Counter)
    """Sums of `count_changes`."""
    cut: list[int] = field(default_factory=list)
    """Numbers of the rows with dropped turns."""
    first: dict[tuple[bytes, ...], int] = field(default_factory=dict)
    """Number of the first row with the same tokens, by the digest of each side's token ids."""
    duplicates: list[list[int]] = field(default_factory=list)
    """Pairs of row numbers: the first row with the same tokens, and the row."""
    chosen: Counter[bytes] = field(default_factory=Counter)
    """Number of pairs with the same chosen side, by the digest of its token ids."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    control_tokens: list[dict[str, Any]] = field(default_factory=list)
    not_as_sampled: int = 0
    failed: int = 0
    """Number of rows that training leaves out because of a FAILED episode."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of other rows that the run leaves out, by their bin."""
    silent_turns: int = 0
    tally: Tally = field(default_factory=Tally)
    traffic: Traffic = field(default_factory=Traffic)

    def add(self, record: Record, row: Row | DataError) -> None:
        """Add a row to the audit, or record why training would reject it."""
        number = record.number
        try:
            if isinstance(row, DataError):
                raise row
            sides = sides_of(row)
            if any(map(failed, sides)):
                self.failed += 1
                return
            where = self.bins.get(row.key, "trained") if isinstance(row, Trajectory) else "trained"
            if where != "trained":
                self.left_out[where] += 1
                return
            if self.loss is not None:
                given = own_row(record.value) or record.value
                locate("perturn.training.sampled_rows:as_row")(
                    given, number, self.loss, filled=self.source.filled
                )
            self._check_text(number, sides)
            view = self.view
            how = (view.renderer, self.limit, view.shared_prefix)
            self._measure(number, encode_example(row, *how, own_turns=view.own_turns))
            self.silent_turns += sum(len(silent_turns(side)) for side in sides)
            for side in sides:
                self.traffic.add(side)
        except (DataError, ModelError) as error:
            self.refused.append({"part": self.name, **refused(record, str(error))})

    def _measure(self, number: int, example: Example) -> None:
        """Add the counts, lengths and digests of a usable row. Its tokens are not kept."""
        sides = example.sides
        dropped = [side.dropped_turns for side in sides]
        unknown = count_unknown([example], self.view.tokenizer)
        self.counts.update({"usable": 1, "unknown": unknown, **totals([example])})
        self.counts.update({"cut": sum(each > 0 for each in dropped), "dropped": sum(dropped)})
        self.changes.update(count_changes(example, self.view.tokenizer))
        for side in sides:
            self.lengths["tokens"] += [at.stop - at.start for at in side.sequences]
            self.lengths["turns"].append(side.turns)
            self.lengths["tokens_of_a_turn"] += _turn_lengths(side)
        if any(dropped):
            self.cut.append(number)
        key = tuple(hashlib.sha256(array("q", side.ids)).digest() for side in sides)
        if self.first.setdefault(key, number) != number:
            self.duplicates.append([self.first[key], number])
        if example.rejected is not None:
            self.chosen[key[0]] += 1

    def _check_text(self, number: int, sides: Iterable[Trajectory]) -> None:
        """Look for control tokens in texts, and for actions whose text differs from their token ids."""
        for side in sides:
            for turn, where, tokens in self._control_tokens(side):
                self.control_tokens.append(
                    {"part": self.name, "row": number, "turn": turn, "where": where, "tokens": tokens}
                )
            self.not_as_sampled += sum(
                not self._is_as_sampled(turn.action, side.tools) for turn in side.turns
            )

    def _control_tokens(self, side: Trajectory) -> Iterator[tuple[int | None, str, list[str]]]:
        """Yield each text of a trajectory that contains control tokens, with its turn, its location, and the tokens."""
        renderer = self.view.renderer
        control = renderer.control
        texts: list[tuple[int | None, str, list[str]]] = [
            (None, "prompt", control.find(side.prompt)),
            (None, "tools", control.find_in_values(side.tools)),
            (None, "chat_template_kwargs", control.find_in_values([side.template_kwargs])),
        ]
        for index, turn in enumerate(side.turns):
            opened = () if turn.opening is None else turn.opening.prompt
            heard = control.find((*opened, *turn.observation, *(turn.recalled or ())))
            texts += [(index, "observation", heard), (index, "action", renderer.control_in(turn.action))]
        return (text for text in texts if text[2])

    def _is_as_sampled(self, action: Action, tools: Tools) -> bool:
        """Return whether an action's text equals its decoded token ids, with or without marks of thoughts."""
        if action.token_ids is None or action.tool_calls:
            return True
        read = self.view.renderer.action(action.token_ids, (), tools)
        said = understand(read, tools)[0] if tools else read
        bare = self.view.tokenizer.decode(
            action.token_ids, skip_special_tokens=True
        )  # as earlier versions did
        return action.text.strip() in (said.text.strip(), bare.strip())

    def summary(self) -> dict[str, Any]:
        """Return counts, lengths, duplicates, and turns that would be cut."""
        counts = self.counts
        return {
            "rows": counts["usable"] + len(self.refused) + self.failed + self.left_out.total(),
            "failed": self.failed,
            "left_out": dict(self.left_out),
            **{name: counts[name] for name in ("usable", *totals([]))},
            "unknown_tokens": counts["unknown"],
            "lengths": {name: _spread(values) for name, values in self.lengths.items()},
            "duplicates": {
                "rows": len(self.duplicates),
                "examples": self.duplicates[:_EXAMPLES],
                "chosen_used_again": sum(count - 1 for count in self.chosen.values()),
            },
            "silent_turns": self.silent_turns,
            "traffic": self.traffic.to_dict(),
            "read_as": self.source.shape,
            "unit": self.source.unit,
            "shapes": dict(self.tally.shapes),
            "unread": describe_unread(self.tally.unread),
            "notes": [*notes_on(self.tally), *notes_on_changes(self.changes)],
            "cut": {
                "trajectories": counts["cut"],
                "turns": counts["dropped"],
                "limit": self.limit,
                "rows": self.cut[:_EXAMPLES],
            },
        }


def _turn_lengths(side: Encoded) -> Iterable[int]:
    """Return the number of loss tokens of every turn."""
    return Counter(turn for turn in side.turn if turn != NO_TURN).values()


def _spread(values: Sequence[int]) -> dict[str, float]:
    """Return the minimum, median, upper quantiles and maximum of some values; empty without values."""
    if not values:
        return {}
    points = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(values, at)) for name, at in points.items()}


def _run_facts(run: RunPaths, rows: RowMaker | None) -> dict[str, Any]:
    """Return further facts about the data of a run."""
    facts: dict[str, Any] = {}
    files = [run.trajectories(stage) for stage in ("expert", f"explore{run.mark}")]
    experts, explored = (list(read_trajectories(file)) if file.is_file() else [] for file in files)
    solved = [one for one in experts if succeeded(one)]
    with_expert = rows is not None and rows.traits == RowTraits("pairs", expert=True)
    if rows is not None and with_expert and all(file.is_file() for file in files):
        inputs = RowInputs(sorted(explored, key=lambda one: one.key), solved)
        facts["pairing"] = dict(rows(inputs).counts)
    others = map(run.trajectories, ("lessons", *(f"explore{mark}" for mark in run.marks[:-1])))
    trained = {one.task.id for one in (*experts, *explored)}.union(*map(read_tasks, others))
    evaluated = {task for file in run.evaluated(()).values() for task in read_tasks(file)}
    facts["tasks"] = {
        "unsuccessful_expert": len(experts) - len(solved),
        "evaluated_and_trained": len(trained & evaluated),
    }
    if sides := read_sides(run.confidence(run.mark), Confidences):
        facts["weights"] = {side: _weights([row[side] for row in sides]) for side in ("chosen", "rejected")}
    return facts


def _weights(sides: Sequence[Any]) -> dict[str, float]:
    weights = [weight for side in sides for weight in side["weight"]]
    return {
        "turns": len(weights),
        "mean_confidence": float(np.mean([value for side in sides for value in side["confidence"]])),
        "mean_weight": float(np.mean(weights)),
        "highest_weight_share": float(np.mean(np.isclose(weights, max(weights)))),
    }
