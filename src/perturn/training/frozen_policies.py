"""Policies that do not change, such as the reference, and their outputs for the rows of a training."""

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
    """A policy that does not move, whose log-probabilities rows hold.

    It is computed before training. Rows that come later need the same policy, and the trained one has moved by then.
    """

    def __init__(self, name: str, args: TurnConfig, precision: Precision) -> None:
        """Ask nothing yet.

        Args:
            name: Field of an example that it fills: `reference` or `proximal`.
            args: Settings of the training.
            precision: That training runs in.
        """
        self._name, self._args, self._precision = name, args, precision
        self._identity: str | None = None
        self._load: Callable[[], Any] | None = None
        self._beneath: Tensor | None = None

    def ask(self, parts: Iterable[Examples], model: Any, track: Track | None) -> None:
        """Give each row the log-probabilities of the policy, which are kept on disk.

        Args:
            parts: The rows.
            model: The policy.
            track: Wraps the work to show progress; None: tqdm, unless `disable_tqdm`.
        """
        with self._on_device(model):
            self._identity = reference_identity(model, self._precision)
            self._fill(parts, model, self._identity, track)

    def keep(self, load: Callable[[], Any] | None) -> None:
        """Remember how to load the policy again for later rows; None, or a call that returns None: it is gone."""
        self._load = load

    def keep_beneath(self, model: Any) -> None:
        """Remember the policy as the model that adapters are added to after this call."""
        with self._on_device(model):
            self._beneath = probe_logprobs(model, self._precision)

    def ask_later(self, part: Examples, trained: Any) -> None:
        """Give rows that come later the log-probabilities of the policy that the first rows hold.

        Args:
            part: The rows.
            trained: The model in training, in its current state; None if it cannot be the policy, or its weights are
                divided among processes.

        Raises:
            ConfigError: If the policy no longer exists.
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
        """Yield models that may be the policy, and whether without their adapters."""
        if trained is not None:
            yield trained, self._beneath is not None
        again = None if self._load is None else self._load()
        if again is not None:
            yield again, False

    def _is_same(self, model: Any, without_adapters: bool) -> bool:
        """Return whether a model is the policy that the first rows hold the log-probabilities of."""
        if without_adapters:  # they give the layers other names, and so the model another identity
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
        """Move the model to the device that trains, and back at the end of the block."""
        home = model.device
        if home != self._args.device:
            model.to(self._args.device)
        try:
            yield
        finally:
            if home != self._args.device:
                model.to(home)
