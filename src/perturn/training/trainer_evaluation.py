"""Metrics of training steps, and evaluation: named sets of rows, and values of each row."""

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
from transformers.trainer_utils import PredictionOutput, denumpify_detensorize

from perturn.errors import DataError, check_fit, did_you_mean
from perturn.losses import TurnLogprobs
from perturn.losses.protocol import loss_values, row_rewards
from perturn.policy.examples import Example
from perturn.policy.logprobs import continuing
from perturn.policy.packing import Batch, Examples
from perturn.training.sharding import ShardedTrainer
from perturn.training.turn_config import TurnConfig

Sets = Examples | dict[str, Examples]
"""Encoded rows: one set, or several sets by name."""


def encoded_sets(given: Any, name: str, encode: Callable[[Iterable[Any], str], Examples]) -> Sets:
    """Encode a set of rows, or each set of a dict.

    Args:
        given: Rows, or a dict of rows by name, such as a `datasets.DatasetDict`.
        name: Name of the rows in error messages.
        encode: Function from rows and their name to encoded rows.

    Raises:
        DataError: If the dict is empty, or a key is no string.
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


def parts_of(*sets: Sets | None) -> list[Examples]:
    """Return all sets as a list, without their names and without missing sets."""
    given = (each for each in sets if each is not None)
    return [part for each in given for part in ([each] if isinstance(each, Examples) else each.values())]


def named_set(sets: Any, name: str) -> Any:
    """Return the set with the given name.

    Raises:
        DataError: If there is no such set.
    """
    if not isinstance(sets, Mapping) or name not in sets:
        known = sets if isinstance(sets, Mapping) else ()
        raise DataError(f"no set of eval_dataset is named {name!r}.{did_you_mean(name, known)}")
    return sets[name]


class RowValues:
    """Collects values of each row over several passes and processes, in the order of the rows."""

    def __init__(self) -> None:
        self._batches: list[dict[str, list[float]]] = []

    def add(self, packs: Sequence[Batch], of_rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Store the values of one batch of this process.

        Args:
            packs: Packs of the batch. `row` holds the index of each row in the batch; empty packs have no `row`.
            of_rows: For each pack, the values of its rows by name [rows].
        """
        rows = [row for pack in packs if "row" in pack for row in pack["row"].tolist()]
        values: dict[str, list[float]] = defaultdict(list)
        for found in of_rows:
            for name, each in found.items():
                values[name] += each.float().tolist()
        order = sorted(range(len(rows)), key=rows.__getitem__)
        self._batches.append({name: [each[index] for index in order] for name, each in values.items()})

    def take(self) -> dict[str, NDArray[np.float32]]:
        """Return all values since the last call, by name [rows]; all processes must call this."""
        found: dict[str, list[float]] = defaultdict(list)
        # accelerate deals batches to the processes in turn.
        for batch in chain.from_iterable(zip_longest(*gather_object([self._batches]), fillvalue={})):
            for name, values in batch.items():
                found[name] += values
        self._batches = []
        return {name: np.array(values, np.float32) for name, values in found.items()}


class EvaluatingTrainer(ShardedTrainer):
    """Part of `TurnTrainer` that evaluates: the trainer's own eval sets, and rows that are added later."""

    turn_args: TurnConfig
    _means: dict[str, Means]
    _row_values: RowValues
    _evaluated: dict[str, Tensor]
    """Additional inputs of the loss over all evaluated rows, by keyword [rows]."""

    def _encode_later(self, rows: Iterable[Any], name: str) -> Examples:
        """Encode rows that are added after `__init__`."""
        raise NotImplementedError

    def _statistics(self, rows: Sequence[Example]) -> list[Any]:
        """Return, for each evaluated row, the number that the loss reads, or None if it reads no number."""
        raise NotImplementedError

    def _as_many_as_others(self, packs: list[Batch]) -> list[Batch]:
        """Put empty packs before this process's packs, so that all processes make the same number of passes."""
        raise NotImplementedError

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context with the precision of training."""
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate rows and return their metrics; several sets are evaluated one after the other, as in transformers.

        Args:
            eval_dataset: Rows in the formats of `train_dataset`, a dict of several sets by name, or the name of a set
                of the trainer's own `eval_dataset`. None: the trainer's own `eval_dataset`.
            ignore_keys: Not used.
            metric_key_prefix: Prefix of the names of metrics; with several sets, the set's name follows it.

        Raises:
            PerturnError: If a row is wrong, or the reference is no longer available (see `Frozen.ask_later`).
        """
        if eval_dataset is None and not isinstance(self.eval_dataset, Examples | dict):
            eval_dataset = self.eval_dataset  # None, or rows that were assigned after `__init__`
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
        """Evaluate rows; return their metrics, and the values of each row.

        The field `predictions` of the result has a list per value, by the value's name [rows]. The values are the loss
        and the log-probabilities (`logps/chosen`, also for undesirable rows). Pairs also have implicit rewards
        (`rewards/chosen`). Rows with a FAILED episode are ignored, with a warning.

        Args:
            test_dataset: Rows in the formats of `train_dataset`, or the name of a set of `eval_dataset`.
            ignore_keys: Not used.
            metric_key_prefix: Prefix of the names of metrics.

        Raises:
            PerturnError: If a row is wrong, or the reference is no longer available (see `Frozen.ask_later`).
        """
        if test_dataset is None or isinstance(test_dataset, Mapping):
            raise DataError(
                f"predict takes one set of rows, got {'none' if test_dataset is None else 'a dict'}; call it for each "
                "set, or call evaluate."
            )
        rows = named_set(self.eval_dataset, test_dataset) if isinstance(test_dataset, str) else test_dataset
        return super().predict(self._encode_later(rows, "test"), ignore_keys, metric_key_prefix)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader for evaluation; persistent workers are used only for the trainer's own `eval_dataset`."""
        if isinstance(eval_dataset, Examples):
            return self.get_test_dataloader(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate all rows as one step, so that every metric, including the loss, is a mean over all rows."""
        rows = cast("Examples", dataloader.dataset).rows
        self.model.eval()  # a statistic must not draw dropout
        getattr(self.optimizer, "eval", lambda: None)()
        statistics = self._statistics(rows)
        self._evaluated = {} if None in statistics else {"step": torch.tensor(statistics)}
        self._means["eval"] = Means()
        output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        values = self._row_values.take()
        found = self._means["eval"].take()
        if values and self.compute_metrics is not None:
            own = self.compute_metrics(EvalPrediction(cast(Any, values), cast(Any, None)))
            found |= denumpify_detensorize(own)  # so that a checkpoint can store them
        begin = f"{kwargs['metric_key_prefix']}_"
        output.metrics.update({f"{begin}{name.removeprefix(begin)}": mean for name, mean in found.items()})
        return output._replace(predictions=values or None)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0, since the Trainer's formula does not fit packed training."""
        return 0

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of the packs of all processes for `include_num_input_tokens_seen`; packs have no padding."""
        if self.args.include_num_input_tokens_seen != "no":
            own = torch.tensor(sum(len(pack["ids"]) for pack in inputs["packs"]), device=self.args.device)
            self.state.num_input_tokens_seen += int(self.accelerator.gather(own).sum())

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Compute losses and metrics of this process's packs; logits are not returned."""
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
"""Ranges of turn positions whose metrics are averaged: the name and the last turn of each range."""

LATER = "33-"


class Means:
    """Running means of values by name, over passes and processes; sums and counts stay on the process's device."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, values: Tensor) -> None:
        """Add the values of one pass of this process; other processes may add other names, or more or fewer values."""
        if not values.numel():
            return
        part = torch.stack([values.float().sum(), values.new_tensor(values.numel(), dtype=torch.float)])
        self._parts[name].append(part)

    def take(self) -> dict[str, float]:
        """Return the means over all processes since the last call, by name; all processes must call this.

        Names with `_spread/` get a standard deviation instead; see `by_position`.
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


def row_values(
    loss: Any, chosen: TurnLogprobs, rejected: TurnLogprobs | None, step: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each row of a pack [rows], and the values to log by name [rows]; see `row_metrics`."""
    value = loss_values(loss, chosen, rejected, **step)
    return value, row_metrics(loss, chosen, rejected) | {"loss": value.detach()}


@torch.no_grad()
def row_metrics(loss: Any, chosen: TurnLogprobs, rejected: TurnLogprobs | None) -> dict[str, Tensor]:
    """Return values of each row of a pack by name [rows]: log-probabilities, and implicit rewards of pairs.

    `logps/accuracies` is the ranking accuracy: whether the chosen side is more likely than the rejected side under the
    policy.
    Source: Chen et al. 2024, "Preference Learning Algorithms Do Not Learn Preference Rankings", arXiv:2405.19534,
    Definition 2.1. Differs: a side is a whole trajectory, and its log-probability is the sum over action tokens.

    Args:
        loss: The loss.
        chosen: Chosen sides of the rows.
        rejected: Rejected sides of the rows; None if the loss reads one side.
    """
    found = {"logps/chosen": chosen.sum_by_trajectory(chosen.policy)}
    if rejected is not None:
        rewards, others = row_rewards(loss, chosen), row_rewards(loss, rejected)
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
    """Return additional values of a pack by name, whose means are logged (docs/methods/logged.md).

    Entropies have one value per token, and weights one value per turn. A diagnostic of the loss replaces the value of
    `row_metrics` with the same name, even if it has no value in this pack.

    Args:
        loss: The loss.
        chosen: Chosen sides of the rows.
        rejected: Rejected sides of the rows; None if the loss reads one side.
        step: Keyword arguments of the loss that concern the whole optimizer step.
        entropy: Entropy of the policy at each loss token, in nats [loss tokens]; None: unknown.
    """
    of_chosen, of_rejected = (None, None) if entropy is None else entropy.tensor_split([len(chosen.policy)])
    found: dict[str, Any] = {"weight/chosen": chosen.weight, "entropy/chosen": of_chosen}
    if rejected is not None:
        found |= {"weight/rejected": rejected.weight, "entropy/rejected": of_rejected}
    found |= _tensors(loss, loss.diagnostics(chosen, rejected, **step)) if loss.traits.diagnostics else {}
    if loss.traits.turn_diagnostics:
        of_turns = {} if of_chosen is None else {"entropy": chosen.mean_by_turn(of_chosen)}
        values = {**_tensors(loss, loss.turn_diagnostics(chosen)), **of_turns}
        found |= by_position(chosen, values)
        found |= {"kl/turns": values["kl"]} if "kl" in values else {}
    return {name: value for name, value in found.items() if value is not None}


def _tensors(loss: Any, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the diagnostics of a loss.

    Raises:
        ConfigError: If one is neither a tensor nor None.
    """
    for name, value in found.items():
        whose = f"{name} of the diagnostics of loss {type(loss).__name__}"
        check_fit(isinstance(value, Tensor | None), whose, "be a tensor, or None", value)
    return found


def by_position(side: TurnLogprobs, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Group values of turns by the turn's position in its episode; turns without loss count for the position.

    Args:
        side: Inputs of the loss for the turns.
        values: Values of each turn, by name [turns].

    Returns:
        Values by name and range of positions, such as `ratio/turn_3-4` [turns in the range]. `advantage_spread/turn_1`
        holds the squares of `advantage/turn_1`, from which `Means.take` computes the standard deviation.
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
    """Return the population standard deviation, from the mean of the squares and the mean."""
    variance = means[name] - means[name.replace("_spread/", "/")] ** 2
    return math.sqrt(max(0.0, variance))
