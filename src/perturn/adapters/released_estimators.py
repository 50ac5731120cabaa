"""Advantage estimators of other libraries as credits, to measure their bias: `perturn check-credit verl:rloo`.

The library's own released code runs on a batch of one group. The batch has the form of the library's rollouts. Each
turn is one token, since the bias is measured per choice of a token. An observation of one token follows each turn.
Tensors are float64, while the libraries train in float32.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from perturn.credit import CreditTraits
from perturn.credit.turn_gae import TurnGAE
from perturn.errors import ConfigError, check_known, check_provided
from perturn.needs import Needs, Values
from perturn.table import guarded
from perturn.types import Trajectory


@dataclass(frozen=True)
class ReleasedBatch:
    """A group of episodes as padded tensors; the token of turn t is at position 2 t."""

    mask: Tensor
    """1 at tokens of turns, else 0 [episodes, tokens]."""
    rewards: Tensor
    """Reward of each turn at its token, else 0 [episodes, tokens]."""
    values: Tensor
    """V of the state before each turn, at its token and at the observation before it [episodes, tokens]. All 0 if the
    estimator does not read V."""

    @property
    def response(self) -> Tensor:
        """Mask with 1 at the tokens of turns and of observations between turns [episodes, tokens]."""
        return (self.mask.flip(1).cumsum(1).flip(1) > 0).to(self.mask.dtype)

    @property
    def outcome(self) -> Tensor:
        """Total reward of each episode at its last token, else 0 [episodes, tokens]."""
        found = torch.zeros_like(self.rewards)
        found[torch.arange(len(found)), self.response.sum(1).long() - 1] = self.rewards.sum(1)
        return found


Estimate = Callable[[ReleasedBatch], Tensor]
"""Function from a batch to the advantage of each token [episodes, tokens] or of each episode [episodes]."""


@dataclass(frozen=True)
class ReleasedEstimator:
    """An advantage estimator of another library as a credit."""

    estimate: Estimate
    library: str
    """Name and version of the library."""
    discount: float = 1.0
    needs: Needs = ()

    @property
    def traits(self) -> CreditTraits:
        """Traits of the credit: it needs a whole group, and it discounts rewards by `discount`."""
        return CreditTraits(needs_group=True, weighs_alone=True, discount=self.discount)

    def __call__(
        self, group: Sequence[Trajectory], *, values: Sequence[Sequence[Any]] | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of each turn, as one tensor [turns] per trajectory."""
        rewards = [[turn.reward for turn in one.turns] for one in group]
        before = [[0.0] * len(own) for own in rewards]
        if values is not None:
            before = [[float(torch.as_tensor(turn).reshape(-1)[0]) for turn in own] for own in values]
        ones = [[1.0] * len(own) for own in rewards]
        mask, paid, known = map(_spread, (ones, rewards, before))
        known[:, 1:-1:2] = known[:, 2::2]
        found = self.estimate(ReleasedBatch(mask, paid, known))
        by_token = found[:, None].expand(-1, 2 * max(map(len, rewards))) if found.dim() == 1 else found
        return [row[: 2 * len(own) : 2].double().clone() for row, own in zip(by_token, rewards, strict=True)]


def _spread(numbers: Sequence[Sequence[float]]) -> Tensor:
    """Return a tensor with the number of each turn at its token, and 0 elsewhere [episodes, tokens]."""
    found = torch.zeros(len(numbers), 2 * max(map(len, numbers)), dtype=torch.float64)
    for row, own in zip(found, numbers, strict=True):
        row[: 2 * len(own) : 2] = torch.tensor(own, dtype=torch.float64)
    return found


@dataclass(frozen=True)
class _Library:
    """A library whose estimators can be measured."""

    package: str
    """Name of the package for pip."""
    module: str
    """Dotted name of the module with the estimators."""
    estimators: Callable[[Any], Iterable[str]]
    """Function from the module to the names of its estimators."""
    make: Callable[[Any, str, dict[str, Any]], tuple[Estimate, bool]]
    """Function (module, name, settings) -> (estimator, whether the estimator reads V). It removes the settings that it
    reads."""


def is_released(name: str) -> bool:
    """Return whether a name has the form `library:estimator` with a known library, such as `verl:rloo`."""
    return name.partition(":")[0] in _LIBRARIES and ":" in name


def released_estimator(section: Mapping[str, Any]) -> ReleasedEstimator:
    """Return an estimator of an installed library as a credit.

    Args:
        section: Section `credit` with the key `name`, such as `verl:rloo`, and settings of the estimator, such as
            `gamma` and `lam`.

    Raises:
        ConfigError: If the library is not installed or lacks the estimator, or the estimator reads an input that this
            module cannot provide.
    """
    host, _, name = str(section["name"]).partition(":")
    library = _LIBRARIES[host]
    try:
        installed = version(library.package)
    except PackageNotFoundError:
        raise ConfigError(
            f"{host}:{name} is measured where {host} is installed; run `pip install --no-deps {library.package}`, or "
            "`make test-hosts` in a checkout of Perturn."
        ) from None
    installs = ". `make test-hosts` in a checkout of Perturn installs what it needs without a GPU."
    with guarded(f"{library.package} {installed} cannot be imported", installs):
        module = import_module(library.module)
    check_known(name, list(library.estimators(module)), f"{host} {installed} has no estimator {name!r}")
    settings = {key: value for key, value in section.items() if key != "name"}
    discount = float(settings.get("gamma", 1.0))
    estimate, reads_values = library.make(module, name, settings)
    if settings:
        raise ConfigError(f"{host}:{name} has no setting {', '.join(sorted(settings))}.")
    needs = (Values(TurnGAE(gamma=discount).value_targets),) if reads_values else ()
    return ReleasedEstimator(estimate, f"{library.package} {installed}", discount, needs)


class _Config(dict[str, Any]):
    """Settings of an algorithm that can be read as attributes or as keys, since libraries do both."""

    __getattr__ = dict.__getitem__


def _function(
    function: Callable[..., Any],
    name: str,
    settings: dict[str, Any],
    given: Callable[[ReleasedBatch], dict[str, Any]],
) -> tuple[Estimate, bool]:
    """Make an estimator from a function, whose parameters are filled by name from a batch and from the settings.

    Args:
        function: Function that returns advantages and returns.
        name: Name of the estimator, for error messages.
        settings: Settings of the user; settings that the function reads are removed from the dict.
        given: Function from a batch to the arguments that it provides, by name.

    Returns:
        The estimator, and whether it reads V.

    Raises:
        ConfigError: If the function requires an argument that is not provided.
    """
    parameters = inspect.signature(function).parameters
    own: dict[str, Any] = {"gamma": 1.0, "lam": 1.0}
    own |= {key: settings.pop(key) for key in list(settings) if key in {*own, *parameters}}
    own |= {"lambd": own["lam"], "config": _Config(own)}

    def arguments(batch: ReleasedBatch) -> dict[str, Any]:
        return {key: value for key, value in {**given(batch), **own}.items() if key in parameters}

    empty = torch.zeros(1, 2, dtype=torch.float64)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    reads = {key for key, one in parameters.items() if one.default is one.empty and one.kind not in kinds}
    there = arguments(ReleasedBatch(empty, empty, empty))
    check_provided(name, sorted(reads), there, "the episode of a small process", "take another estimator")
    return lambda batch: function(**arguments(batch))[0], "values" in reads


def _shared_arguments(batch: ReleasedBatch, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    """Return the arguments that estimators of verl and SkyRL have in common, by name."""
    import numpy as np

    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array(["group"] * len(mask), dtype=object),
        "values": batch.values,
    }


def _verl(module: Any, name: str, settings: dict[str, Any]) -> tuple[Estimate, bool]:
    """Make an estimator of verl's registry. The total reward is at the last token, as in verl's agent loops."""

    def given(batch: ReleasedBatch) -> dict[str, Any]:
        return _shared_arguments(batch, batch.outcome, batch.mask)

    return _function(module.ADV_ESTIMATOR_REGISTRY[name], f"verl:{name}", settings, given)


def _skyrl(module: Any, name: str, settings: dict[str, Any]) -> tuple[Estimate, bool]:
    """Make an estimator of SkyRL's registry. Rewards are at the ends of turns, and masks include observations."""

    def given(batch: ReleasedBatch) -> dict[str, Any]:
        return {**_shared_arguments(batch, batch.rewards, batch.response), "grpo_norm_by_std": True}

    function = inspect.unwrap(module.AdvantageEstimatorRegistry.get(name))
    return _function(function, f"skyrl:{name}", settings, given)


_TRL: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "grpo": (
        "GRPOTrainer",
        "self.multi_objective_aggregation",
        {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"},
    ),
    "rloo": ("RLOOTrainer", "grouped_rewards = ", {"normalize_advantages": False}),
}
"""Name of an estimator -> TRL's trainer, text of the first statement that computes advantages, and trainer settings."""

_TRL_ENDS = "advantages = torch.nan_to_num("
"""Beginning of the last statement that computes advantages."""


def _trl(module: Any, name: str, settings: dict[str, Any]) -> tuple[Estimate, bool]:
    """Make an estimator from a trainer of TRL, by running the statements of its method that compute advantages.

    Raises:
        ConfigError: If the statements are not found in the installed version of TRL.
    """
    trainer, begins, defaults = _TRL[name]
    method = vars(getattr(module, trainer))["_generate_and_score_completions"]
    own = {key: settings.pop(key, value) for key, value in defaults.items()}
    statements = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0].body  # type: ignore[attr-defined]
    texts = [ast.unparse(one) for one in statements]
    first = next((at for at, text in enumerate(texts) if begins in text), len(texts))
    last = next((at for at, text in enumerate(texts) if text.startswith(_TRL_ENDS)), -1)
    if last < first:
        raise ConfigError(
            f"trl:{name}: {trainer} computes advantages in another way than TRL 1.16; install trl 1.16."
        )
    code = compile("\n".join(texts[first : last + 1]), f"<{trainer}>", "exec")

    def estimate(batch: ReleasedBatch) -> Tensor:
        scores = batch.rewards.sum(1)
        weights = torch.ones(1, dtype=scores.dtype)
        space = {
            **method.__globals__,
            "self": SimpleNamespace(reward_weights=weights, reward_funcs=[None], **own),
            "device": scores.device,
            "rewards_per_func": scores[:, None],
            "rewards": scores,
            "num_generations": len(scores),
            "unscorable_mask": scores.isnan(),
        }
        exec(code, space)
        found: Tensor = space["advantages"]
        return found

    return estimate, False


def _tinker(module: Any, name: str, settings: dict[str, Any]) -> tuple[Estimate, bool]:
    """Make an estimator from tinker-cookbook's function that subtracts a group's mean reward."""

    def estimate(batch: ReleasedBatch) -> Tensor:
        totals = SimpleNamespace(get_total_rewards=lambda: batch.rewards.sum(1).tolist())
        found: Tensor = module.compute_advantages([totals])[0]
        return found

    return estimate, False


_LIBRARIES: Mapping[str, _Library] = {
    "verl": _Library("verl", "verl.trainer.ppo.core_algos", lambda one: one.ADV_ESTIMATOR_REGISTRY, _verl),
    "skyrl": _Library(
        "skyrl",
        "skyrl.backends.skyrl_train.utils.ppo_utils",
        lambda one: one.AdvantageEstimatorRegistry.list_available(),
        _skyrl,
    ),
    "trl": _Library("trl", "trl", lambda one: _TRL, _trl),
    "tinker-cookbook": _Library(
        "tinker-cookbook", "tinker_cookbook.rl.data_processing", lambda one: ["compute_advantages"], _tinker
    ),
}
