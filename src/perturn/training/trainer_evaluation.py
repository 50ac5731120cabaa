"""Metrics of training steps, and evaluation of a trainer: sets of rows by name, and the values of each row."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, zip_longest
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_utils import PredictionOutput

from perturn.errors import DataError, check_fit, did_you_mean
from perturn.losses import TurnLogprobs
from perturn.policy.examples import Example
from perturn.policy.logprobs import continuing
from perturn.policy.packing import Batch, Examples
from perturn.training.sharding import ShardedTrainer
from perturn.training.turn_config import TurnConfig

Sets = Examples | dict[str, Examples]
"""Encoded rows: one set of them, or several by name."""


def encoded_sets(given: Any, name: str, encode: Callable[[Iterable[Any], str], Examples]) -> Sets:
    """Encode rows, or each set of a dict of rows.

    Args:
        given: Rows, or a dict of rows by name, such as a `datasets.DatasetDict`.
        name: What they are called in an error.
        encode: Rows and their name -> encoded rows.

    Raises:
        DataError: If a dict has no set, or a name that is not a text.
    """
    if not isinstance(given, Mapping):
        return encode(given, name)
    if not given:
        raise DataError(
            f"the {name} dataset is a dict without a set; give at least one, such as {{'seen': rows}}."
        )
    for key in given:
        if not isinstance(key, str):
            raise DataError(f"the sets of the {name} dataset must be named by texts, got {key!r:.80}.")
    return {key: encode(rows, f"{name} {key!r}") for key, rows in given.items()}


def parts_of(sets: Sets | None) -> list[Examples]:
    """Return the sets, without their names."""
    if sets is None:
        return []
    return [sets] if isinstance(sets, Examples) else list(sets.values())


def named_set(sets: Any, name: str) -> Any:
    """Return the set of a name."""
    if not isinstance(sets, Mapping) or name not in sets:
        known = sets if isinstance(sets, Mapping) else ()
        raise DataError(f"no set of eval_dataset is named {name!r}.{did_you_mean(name, known)}")
    return sets[name]


def refuse_best_metric(metric: str | None, sets: Sets | None) -> None:
    """Reject a metric for the best model that no set has, before training rather than at its first evaluation.

    Args:
        metric: `metric_for_best_model`; transformers sets it to `loss` where the best model is loaded at the end.
        sets: What is evaluated on. With one set, metrics have no set's name, such as `eval_loss`.

    Raises:
        ConfigError: If there are several sets, and the metric is of none.
    """
    if metric is None or not isinstance(sets, dict):
        return
    fits = any(metric.removeprefix("eval_").startswith(f"{name}_") for name in sets)
    must = f"be a metric of one set of eval_dataset, such as {f'eval_{next(iter(sets))}_loss'!r}"
    check_fit(fits, "metric_for_best_model", must, metric)


class RowValues:
    """Values of each row by name, of several passes and processes, in the order of the rows."""

    def __init__(self) -> None:
        self._batches: list[dict[str, list[float]]] = []

    def add(self, packs: Sequence[Batch], of_rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Keep the values of the rows of one batch of this process.

        Args:
            packs: The packs of the batch, with the index of each row in it as `row`; those without rows have none.
            of_rows: Values of the rows of each pack, by name.
        """
        rows = [row for pack in packs if "row" in pack for row in pack["row"].tolist()]
        values: dict[str, list[float]] = defaultdict(list)
        for found in of_rows:
            for name, each in found.items():
                values[name] += each.float().tolist()
        order = sorted(range(len(rows)), key=rows.__getitem__)
        self._batches.append({name: [each[index] for index in order] for name, each in values.items()})

    def take(self) -> dict[str, NDArray[np.float32]]:
        """Return all values by name [rows] since the last call; every process makes it, and waits for the others."""
        found: dict[str, list[float]] = defaultdict(list)
        # Batches are dealt to the processes in turn.
        for batch in chain.from_iterable(zip_longest(*gather_object([self._batches]), fillvalue={})):
            for name, values in batch.items():
                found[name] += values
        self._batches = []
        return {name: np.array(values, np.float32) for name, values in found.items()}


class EvaluatingTrainer(ShardedTrainer):
    """The part of `TurnTrainer` that evaluates: rows that it was made with, and rows that come later."""

    turn_args: TurnConfig
    _means: dict[str, Means]
    _row_values: RowValues
    _evaluated: dict[str, Tensor]
    """Numbers of all rows that are evaluated which the loss reads, by keyword."""

    def _encode_later(self, rows: Iterable[Any], name: str) -> Examples:
        """Encode rows that come after the trainer was made."""
        raise NotImplementedError

    def _statistics(self, rows: Sequence[Example]) -> list[Any]:
        """Return a number of each row that is evaluated, which the loss reads; None for each where it reads none."""
        raise NotImplementedError

    def _as_many_as_others(self, packs: list[Batch]) -> list[Batch]:
        """Return packs of this process after empty ones, so that all processes make equally many passes."""
        raise NotImplementedError

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the precision training runs in."""
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of rows; several sets are evaluated one after the other, as in transformers.

        Args:
            eval_dataset: Rows, in the formats that the trainer is made with; a dict of several sets by name; the name
                of a set of the trainer's own `eval_dataset`; None: all of that.
            ignore_keys: Not used.
            metric_key_prefix: Begins the names of the metrics; `_` and the name of a set come after it.

        Raises:
            PerturnError: If a row is wrong, or the reference is not to be had any more: see `Frozen.ask_later`.
        """
        if eval_dataset is None and not isinstance(self.eval_dataset, Examples | dict):
            eval_dataset = self.eval_dataset  # none, or rows that were put there later
            if eval_dataset is None:
                raise DataError(
                    "there are no rows to evaluate on; give some, or eval_dataset to the trainer."
                )
        if isinstance(eval_dataset, str):
            named_set(self.eval_dataset, eval_dataset)
        elif eval_dataset is not None:
            eval_dataset = encoded_sets(eval_dataset, "eval", self._encode_later)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return metrics of rows, and as `predictions` a dict of the row values they are means of, by name [rows].

        That is the loss, log-probabilities (`logps/chosen`, also of a row that is not desirable), and of pairs the
        implicit rewards (`rewards/chosen`). Rows whose episode FAILED are left out, which a warning says.

        Args:
            test_dataset: Rows, in the formats that the trainer is made with, or the name of a set of `eval_dataset`.
            ignore_keys: Not used.
            metric_key_prefix: Begins the names of the metrics.

        Raises:
            PerturnError: If a row is wrong, or the reference is not to be had any more: see `Frozen.ask_later`.
        """
        if test_dataset is None or isinstance(test_dataset, Mapping):
            raise DataError(
                f"predict takes one set of rows, got {'none' if test_dataset is None else 'a dict'}; call it for each "
                "set, or call evaluate."
            )
        rows = named_set(self.eval_dataset, test_dataset) if isinstance(test_dataset, str) else test_dataset
        return super().predict(self._encode_later(rows, "test"), ignore_keys, metric_key_prefix)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return batches of rows to evaluate on; persistent workers serve the rows that the trainer was made with."""
        if isinstance(eval_dataset, Examples):
            return self.get_test_dataloader(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate all rows as one step; every metric, the loss too, is a mean over them."""
        rows = cast("Examples", dataloader.dataset).rows
        statistics = self._statistics(rows)
        self._evaluated = {} if None in statistics else {"step": torch.tensor(statistics)}
        self._means["eval"] = Means()
        output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        values = self._row_values.take()
        found = self._means["eval"].take()
        if values and self.compute_metrics is not None:
            found |= self.compute_metrics(EvalPrediction(cast(Any, values), cast(Any, None)))
        output.metrics.update({f"{kwargs['metric_key_prefix']}_{name}": mean for name, mean in found.items()})
        return output._replace(predictions=values or None)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: the Trainer's formula does not know which tokens reach the output layer."""
        return 0

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Compute losses and metrics alone; every process passes its own packs."""
        with torch.no_grad(), self.compute_loss_context_manager():
            packs = [
                self._prepare_inputs(pack | self._evaluated)
                for pack in self._as_many_as_others(inputs["packs"])
            ]
            pairs = int(sum(pack["pairs"].sum() for pack in packs)) * self.args.world_size
            with continuing(model, inputs.get("beginning"), self._autocast):
                found = [self.compute_loss(model, pack, True, num_items_in_batch=pairs) for pack in packs]
        if not prediction_loss_only:
            self._row_values.add(packs, [of_rows for _, of_rows in found])
        return torch.stack([loss for loss, _ in found]).sum(), None, None


POSITIONS = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16, "17-32": 32}
"""Names of ranges of positions that are logged together, with the last turn of each range; later turns are `33-`."""

LATER = "33-"


class Means:
    """Means by name of values that several passes and processes have; sums and counts stay on each one's device."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, values: Tensor) -> None:
        """Keep the values of one pass of this process, if any; processes need not add equally often, or equal names."""
        if not values.numel():
            return
        part = torch.stack([values.float().sum(), values.new_tensor(values.numel(), dtype=torch.float)])
        self._parts[name].append(part)

    def take(self) -> dict[str, float]:
        """Return the mean of all values of all processes since the last call; every process calls it and waits.

        Of values that are `spread` it is their standard deviation; see `by_position`.
        """
        own = {name: torch.stack(parts).sum(0).tolist() for name, parts in self._parts.items()}
        self._parts.clear()
        sums: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for process in gather_object([own]):
            for name, part in process.items():
                sums[name].append(part)
        means = {
            name: sum(total for total, _ in parts) / sum(count for _, count in parts)
            for name, parts in sums.items()
        }
        return {name: _spread(name, means) if "_spread/" in name else mean for name, mean in means.items()}


@torch.no_grad()
def row_metrics(loss: Any, chosen: TurnLogprobs, rejected: TurnLogprobs | None) -> dict[str, Tensor]:
    """Return values of each row of a pack, by name [rows]: log-probabilities, and of pairs the implicit rewards.

    `logps/accuracies` is the ranking accuracy: whether the policy finds the chosen side likelier than the rejected one.
    Source: Chen et al. 2024, "Preference Learning Algorithms Do Not Learn Preference Rankings", arXiv:2405.19534,
    Definition 2.1. Differs: a side is a whole trajectory, and its log-probability the sum over action tokens.

    Args:
        loss: The loss.
        chosen: First sides.
        rejected: Second sides; None where the loss reads one.
    """
    found = {"logps/chosen": chosen.sum_by_trajectory(chosen.policy)}
    if rejected is not None:
        rewards, others = loss.rewards(chosen), loss.rewards(rejected)
        logprobs = rejected.sum_by_trajectory(rejected.policy)
        found |= {
            "logps/rejected": logprobs,
            "logps/accuracies": (found["logps/chosen"] > logprobs).float(),
            "rewards/chosen": rewards,
            "rewards/rejected": others,
            "rewards/accuracies": (rewards > others).float(),
            "rewards/margins": rewards - others,
        }
    return found


@torch.no_grad()
def step_metrics(
    loss: Any,
    chosen: TurnLogprobs,
    rejected: TurnLogprobs | None,
    step: Mapping[str, Tensor],
    entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Return values of a pack to log besides its rows' values, by name; their mean is logged (docs/methods/logged.md).

    Entropy has a value for each token, weights a value for each turn. Diagnostics of the loss may have names of
    `row_metrics`, in whose place they are logged, also where they have no value in this pack.

    Args:
        loss: The loss.
        chosen: First sides.
        rejected: Second sides; None where the loss reads one.
        step: Keyword arguments of the loss for the whole optimizer step.
        entropy: Of the policy at each loss token, in nats [loss tokens]; None: not known.
    """
    of_chosen, of_rejected = (None, None) if entropy is None else entropy.tensor_split([len(chosen.policy)])
    found: dict[str, Any] = {"weight/chosen": chosen.weight, "entropy/chosen": of_chosen}
    if rejected is not None:
        found |= {"weight/rejected": rejected.weight, "entropy/rejected": of_rejected}
    found |= loss.diagnostics(chosen, rejected, **step) if loss.traits.diagnostics else {}
    if loss.traits.turn_diagnostics:
        of_turns = {} if of_chosen is None else {"entropy": chosen.mean_by_turn(of_chosen)}
        values = {**loss.turn_diagnostics(chosen), **of_turns}
        found |= by_position(chosen, values)
        found |= {"kl/turns": values["kl"]} if "kl" in values else {}
    return {name: value for name, value in found.items() if value is not None}


def by_position(side: TurnLogprobs, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values of turns, grouped by position in the episode, also where turns before carry no loss.

    Args:
        side: The batch.
        values: Values of each turn, by name [turns].

    Returns:
        By name and position, such as `ratio/turn_3-4` [turns there]. `advantage_spread/turn_1` has the squares of
        `advantage/turn_1`, from which `Means.take` makes the standard deviation.
    """
    ends = torch.tensor(list(POSITIONS.values()), device=side.turn_index.device)
    number = side.turn_index.new_zeros(side.num_turns).scatter(0, side.turn_index, side.turn.long())
    bucket = torch.bucketize(number + 1, ends)
    found = {}
    for index, position in enumerate((*POSITIONS, LATER)):
        there = bucket == index
        if not there.any():
            continue
        for name, of_turns in values.items():
            found[f"{name}/turn_{position}"] = of_turns[there]
        if "advantage" in values:
            found[f"advantage_spread/turn_{position}"] = values["advantage"][there].square()
    return found


def _spread(name: str, means: Mapping[str, float]) -> float:
    """Return the standard deviation from the mean of the squares and the mean, over all values (population)."""
    variance = means[name] - means[name.replace("_spread/", "/")] ** 2
    return math.sqrt(max(0.0, variance))
