"""Frozen policies, such as the reference, and their log-probabilities for the rows of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from perturn.data.cache_folders import cache_folder
from perturn.errors import ConfigError
from perturn.policy.logprobs import Track
from perturn.policy.packing import Examples
from perturn.policy.reference import Precision, probe_logprobs, reference_identity, reference_logprobs
from perturn.training.row_intake import sequences_of, with_logprobs
from perturn.training.turn_config import TurnConfig


class Frozen:
    """A frozen policy that adds its log-probabilities to rows.

    The log-probabilities are computed before training. Rows that are added later need the same policy, but the trained
    model has changed by then. So this class checks which model still equals the frozen policy.
    """

    def __init__(self, name: str, args: TurnConfig, precision: Precision) -> None:
        """Store the settings; nothing is computed yet.

        Args:
            name: Field of an example for the log-probabilities: `reference`, `proximal`, or an input of the loss.
            args: Settings of the training.
            precision: Precision of training.
        """
        self._name, self._args, self._precision = name, args, precision
        self._identity: str | None = None
        self._load: Callable[[], Any] | None = None
        self._beneath: Tensor | None = None

    def ask(self, parts: Iterable[Examples], model: Any, track: Track | None) -> None:
        """Add the policy's log-probabilities to each row, with a cache on disk.

        Args:
            parts: Sets of rows.
            model: The model of the frozen policy.
            track: Function that wraps an iterable to show progress; None: tqdm, unless `disable_tqdm` is set.
        """
        with self._on_device(model):
            self._identity = reference_identity(model, self._precision)
            self._fill(parts, model, self._identity, track)

    def keep(self, load: Callable[[], Any] | None) -> None:
        """Store a function that returns the policy's model for later rows.

        Args:
            load: The function, which returns None if the model no longer exists; None: the model cannot be loaded.
        """
        self._load = load

    def keep_beneath(self, model: Any) -> None:
        """Record that the policy is this model without the adapters that are added to it after this call."""
        with self._on_device(model):
            self._beneath = probe_logprobs(model, self._precision)

    def ask_later(self, part: Examples, trained: Any) -> None:
        """Add the policy's log-probabilities to rows that are added after the first rows.

        Args:
            part: The added rows.
            trained: The model in training, in its current state. None: it cannot equal the policy, or its weights are
                sharded over processes.

        Raises:
            ConfigError: If no available model equals the policy.
        """
        assert self._identity is not None
        for model, without_adapters in self._candidates(trained):
            adapters = model.disable_adapter() if without_adapters else nullcontext()
            with self._on_device(model), adapters:
                if self._is_same(model, without_adapters):
                    self._fill([part], model, self._identity, None)
                    return
        remedy = "" if self._name == "proximal" else ", or give the trainer a ref_model and keep it"
        raise ConfigError(
            f"these rows need log-probabilities of the {self._name} policy, which is the model as it was before "
            f"training, and its weights have changed since. Pass the rows as eval_dataset to the trainer{remedy}."
        )

    def _candidates(self, trained: Any) -> Iterator[tuple[Any, bool]]:
        """Yield models that may equal the policy, each with whether to disable its adapters."""
        if trained is not None:
            yield trained, self._beneath is not None
        again = None if self._load is None else self._load()
        if again is not None:
            yield again, False

    def _is_same(self, model: Any, without_adapters: bool) -> bool:
        """Return whether a model equals the policy that computed the log-probabilities of the first rows."""
        if without_adapters:  # adapters rename the layers, and thus change the identity
            assert self._beneath is not None
            return torch.equal(probe_logprobs(model, self._precision), self._beneath)
        return reference_identity(model, self._precision) == self._identity

    def _fill(self, parts: Iterable[Examples], model: Any, identity: str, track: Track | None) -> None:
        args = self._args
        for part in parts:
            logprobs = reference_logprobs(
                model,
                sequences_of(part.rows),
                folder=Path(args.reference_cache or cache_folder() / "reference"),
                identity=identity,
                token_budget=args.token_budget,
                precision=self._precision,
                track=track or partial(tqdm, desc=self._name, disable=args.disable_tqdm),
            )
            part.rows = with_logprobs(part.rows, self._name, logprobs)

    @contextmanager
    def _on_device(self, model: Any) -> Iterator[None]:
        """Move the model to the device of training, and move it back at the end of the context."""
        home = model.device
        if home != self._args.device:
            model.to(self._args.device)
        try:
            yield
        finally:
            if home != self._args.device:
                model.to(home)
