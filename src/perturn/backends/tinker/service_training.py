"""The open backend `tinker`: policies are opened at a service, trained by `ServiceTrainer`, and saved there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perturn.backends.tinker.gradient_convention import Convention, find_convention
from perturn.backends.tinker.remote_policy import RemotePolicy
from perturn.backends.tinker.service_trainer import ServiceTrainer
from perturn.backends.tinker.settings import TinkerSettings
from perturn.chat.model_names import load_config, load_tokenizer
from perturn.config.sections import Lora, Train
from perturn.display.progress_bars import console
from perturn.engines.tinker.service import Service
from perturn.engines.tinker.stored_policy import StoredPolicy, stored_policy
from perturn.errors import check_fit
from perturn.io.atomic_write import replacing

_conventions: dict[tuple[TinkerSettings, str], Convention] = {}
"""Gradient conventions found in this process, by settings and base model."""


class ServiceTraining:
    """An open session at a service; methods as in the protocol `Training`."""

    def __init__(self, settings: TinkerSettings, model: str) -> None:
        """Open a session.

        Args:
            settings: Settings of the backend.
            model: The setting `model.name`.

        Raises:
            PerturnError: If the service cannot be reached.
        """
        self._settings, self._model, self._base = settings, model, settings.base(model)
        self._service = Service(settings)
        self._open: list[RemotePolicy] = []

    def check(self, name: str, settings: Train) -> None:
        """Check that the service has a known gradient convention, and clips gradients if the recipe asks for it.

        Args:
            name: Name of a training's section in the recipe.
            settings: Settings of the training.
        """
        assert settings.lora is not None
        convention = self._convention(settings.lora.rank)
        most, host = settings.max_grad_norm, self._settings.host
        remedy = f"{host} does not clip gradients (its steps were as large with grad_clip_norm as without)."
        check_fit(most is None or convention.clips, f"{name}.max_grad_norm", "be null", most, remedy)

    def begin(
        self, start: str, texts: Sequence[str], seed: int, lora: Lora | None, resumes: bool
    ) -> tuple[RemotePolicy, Any]:
        """Open the policy at the service; a base model gets new adapters, which have no effect yet."""
        assert lora is not None
        policy = self._policy(start, lora.rank, seed, resumes)
        return policy, load_tokenizer(start)

    def trainer(
        self, model: RemotePolicy, reference: str | None, lora: Lora | None, **settings: Any
    ) -> ServiceTrainer:
        """Return the trainer of an open policy."""
        assert lora is not None
        other = None if reference is None else self._policy(reference, lora.rank, 0, False)
        most = self._settings.request_tokens
        return ServiceTrainer(model, request_tokens=most, reference=other, **settings)

    def save(self, trainer: ServiceTrainer, target: Path, with_optimizer: bool, merged: bool) -> None:
        """Save the policy at the service, and write a folder that names the saved state; adapters are not merged."""
        with replacing(target, foreign=(Exception,)) as fresh:
            self._write(trainer.policy, trainer.renderer.tokenizer, target.name, fresh)
            if with_optimizer:
                trainer._save_optimizer_and_scheduler(str(fresh))
        self._release()

    def keep(
        self, start: str, target: Path, lora: Lora | None, optimizer: Sequence[Path], merged: bool
    ) -> None:
        """Copy the folder that names the policy's saved state; for a base model, save new adapters at the service."""
        assert lora is not None
        with replacing(target, foreign=(Exception,)) as fresh:
            if stored_policy(start) is not None:
                shutil.copytree(start, fresh)
            else:
                self._write(
                    self._policy(start, lora.rank, 0, False), load_tokenizer(start), target.name, fresh
                )
        self._release()

    def close(self) -> None:
        """Ask the service to drop all open policies, and end the session."""
        self._release()
        self._service.close()

    def _release(self) -> None:
        for policy in self._open:
            policy.close()
        self._open.clear()

    def _write(self, policy: RemotePolicy, tokenizer: Any, name: str, folder: Path) -> None:
        """Save a policy at the service, and write a folder with its state's name, model config and tokenizer."""
        folder.mkdir()
        policy.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        policy.save(name).write(folder)

    def _convention(self, rank: int) -> Convention:
        """Return the gradient convention of the service; the self-test runs once per process."""
        key = self._settings, self._base
        if key not in _conventions:
            console.print(f"self-test of the gradient at {self._settings.host}")
            _conventions[key] = find_convention(self._service, self._base, rank)
            console.print(f"{self._settings.host} takes gradients as {_conventions[key]}")
        return _conventions[key]

    def _policy(self, name: str, rank: int, seed: int, resumes: bool) -> RemotePolicy:
        """Open a policy from its folder, or the base model with new adapters.

        Args:
            name: Folder of a policy, or name of the base model.
            rank: Rank of the adapters.
            seed: Seed of new adapters.
            resumes: Whether to load the saved optimizer state too.
        """
        stored, convention = stored_policy(name), self._convention(rank)
        if stored is None:
            stored = StoredPolicy("", self._base, rank, self._settings.base_url)
            adapter = self._service.adapter(self._base, rank, seed)
        else:
            adapter = self._service.adapter_from(stored.path, resumes)
        config = load_config(self._model)
        policy = RemotePolicy(self._service, adapter, stored, convention, config)
        self._open.append(policy)
        return policy
