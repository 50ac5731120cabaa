"""Quantity `progress`: log-probabilities of each turn's tokens under a trained policy."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, fsum, log
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from perturn.config.recipe import Recipe
from perturn.config.stages import is_of_run, policy_of, reward_model_of
from perturn.errors import ConfigError, check_fit, required
from perturn.needs import Need, Progress
from perturn.policy.models import empty_model
from perturn.quantities.protocol import (
    EXPLORER,
    REFERENCE,
    REWARD,
    Computed,
    Ground,
    Planned,
    Quantity,
    QuantityTraits,
    Source,
)
from perturn.quantities.reference_logprobs import reference_of
from perturn.types import Trajectory

if TYPE_CHECKING:
    from perturn.credit_check.processes import Process, Step


def role_of(request: Progress) -> str:
    """Return the trained policy of a request: its name, or its role in each iteration."""
    return request.checkpoint or (REWARD if request.reward_model else EXPLORER)


def progress_policy(request: Progress, recipe: Recipe, iteration: int) -> str:
    """Return the name of the trained policy in an iteration."""
    if request.checkpoint is not None:
        return request.checkpoint
    return reward_model_of(recipe, iteration) if request.reward_model else policy_of(recipe, iteration - 1)


class ProgressLogprobs(Quantity):
    """Log-probabilities of the tokens of each turn under a trained policy.

    The credit gets them as argument `progress`, in nats `[trajectories][turns]`, each [tokens]. The quantity
    `reference` has the same form.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the trained policy, or of the reward model, over the episodes; training the reward model",
        passes=1,
    )
    request: ClassVar[type[Need]] = Progress

    def policies(self, request: Progress) -> frozenset[str]:
        """Return the roles of the trained policy and of its reference."""
        return frozenset({role_of(request), REFERENCE})

    def check(self, request: Progress, planned: Planned) -> None:
        """Reject a trained policy that is missing or always equals its reference, and a missing reward model.

        Raises:
            PerturnError: If one of these holds; the message says what to set.
        """
        recipe, reads = planned.recipe, role_of(request) == REWARD
        if reads:
            remedy = "add it, such as reward: {model: {}}, or name a trained one in credit.checkpoint"
            of_run = "name a policy in credit.checkpoint, such as one of the run that learned from pairs"
            reader = f"{planned.reader} reads a reward model that learns in each iteration"
            required(recipe.reward_model, "reward.model", reader, of_run if planned.stored else remedy)
        names = planned.references
        if names and all(progress_policy(request, recipe, number) == name for number, name in names.items()):
            raise ConfigError(_own_reference(planned))
        named = request.checkpoint
        if planned.stored or named in (None, "base", policy_of(recipe, 0)):
            return
        must = "be base, sft, a folder or a Hub id, which are there before the loop"
        check_fit(not is_of_run(recipe, named), "credit.checkpoint", must, named)
        empty_model(named)

    def compute(self, request: Progress, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the log-probabilities under the trained policy.

        Raises:
            ConfigError: If the trained policy and its reference have different vocabularies.
        """
        role = role_of(request)
        name, reference = source.policy_name(role), source.policy_name(REFERENCE)
        theirs = source.policy(REFERENCE)
        if name == reference:
            source.tell(
                f"progress is 0 at every turn: policy {name} is its own reference; the outcome alone counts"
            )
            return Computed(reference_of(episodes, theirs))
        ours = source.policy(role)
        vocabularies = [reader.renderer.tokenizer.get_vocab() for reader in (ours, theirs)]
        if vocabularies[0] != vocabularies[1]:
            raise ConfigError(
                f"credit.checkpoint: {name} has other tokens than policy {reference}, so the two cannot be compared; "
                "name a policy that was trained from the same model."
            )
        return Computed(reference_of(episodes, ours))

    def exact(self, request: Progress, ground: Ground) -> list[list[Tensor]]:
        """Return log pi* of each turn, in nats `[episodes][turns]`, each [1].

        pi* is the policy with the highest expected return minus its KL divergence (in nats) from the acting policy pi:
        pi*(a | s) = pi(a | s) exp(Q(s, a) - V(s)), with V(s) = log sum_a pi(a | s) exp Q(s, a) and Q(s, a) = E[r +
        V(next state)]. So log pi* - log pi is an advantage.
        """
        process = ground.episodes.process
        return [
            [
                torch.tensor([_near_best(process, step, t)], dtype=torch.float64)
                for t, step in enumerate(steps)
            ]
            for steps in ground.episodes.steps
        ]


def _own_reference(planned: Planned) -> str:
    """Return the error message for a policy that would be compared with itself, with the remedy."""
    recipe, reference = planned.recipe, next(iter(planned.references.values()), policy_of(planned.recipe, 0))
    if not planned.stored:
        return (
            f"{planned.reader} would compare each policy with itself; take align.reference=start or average and "
            "several iterations, or name another policy in credit.checkpoint."
        )
    trained = policy_of(recipe, recipe.iterations) if recipe.align else "FOLDER"
    return (
        f"progress would be 0 at every turn, since policy {reference} is compared with itself; name a policy that was "
        f"trained from it, such as credit.checkpoint={trained}, or give `perturn credit` another --reference."
    )


def _near_best(process: Process, step: Step, turn: int) -> float:
    """Return log pi* of the action of a turn, in nats; see `ProgressLogprobs.exact`."""
    worth = _soft_worth(process, step.state, turn)
    chance = process.policy(step.state)[step.action]
    return log(chance) + worth[step.action] - _soft_value(process, step.state, turn)


def _soft_worth(process: Process, state: int, turn: int) -> list[float]:
    """Return Q of each action in a state, in units of reward; see `ProgressLogprobs.exact`."""
    return [
        fsum(
            one.probability
            * (one.reward + (0.0 if one.to is None else _soft_value(process, one.to, turn + 1)))
            for one in outcomes
        )
        for outcomes in process.actions[state].values()
    ]


def _soft_value(process: Process, state: int, turn: int) -> float:
    if turn == process.horizon:
        return 0.0
    chances, worth = process.policy(state), _soft_worth(process, state, turn)
    return log(fsum(chance * exp(each) for chance, each in zip(chances, worth, strict=True)))
