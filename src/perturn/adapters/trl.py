"""Adapter for TRL 1.16: `GRPOTrainer` with one advantage per turn.

`PerTurnAdvantages` is a mixin for `trl.GRPOTrainer`. A turn is a run of tokens that the model wrote, between the tokens
of tool results. State keys and rewards of turns are optional. An environment appends them to its attributes
`state_keys` and `turn_rewards`. A `rollout_func` returns them as columns with these names, with an entry for each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import fsum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from perturn.adapters.host_batches import (
    HostEpisode,
    Span,
    fitted_rewards,
    fitted_states,
    on_tokens,
    turn_spans,
    weigh_episodes,
)
from perturn.adapters.host_credits import STATES, host_credit
from perturn.credit import Credit

if TYPE_CHECKING:

    class _Trainer:
        accelerator: Any
        environments: Any
        model: Any
        num_generations: int
        num_generations_eval: int
        reward_weights: Tensor
        rollout_func: Any

        def __init__(self, *args: Any, **settings: Any) -> None: ...
        def _calculate_rewards(self, *args: Any) -> Tensor: ...
        def _generate_single_turn(self, *args: Any, **settings: Any) -> Any: ...
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]: ...

else:
    _Trainer = object

VERSIONS = ">=1.16,<2"

_STATES, _REWARDS = "state_keys", "turn_rewards"
Lengths = dict[str, list[int]]
"""Name of a list that environments append to -> its length in each environment."""


class PerTurnAdvantages(_Trainer):
    """Mixin for `trl.GRPOTrainer`: `credit` computes the advantages."""

    credit: str | Mapping[str, Any] | Credit = "rloo"
    """A credit, the name of a credit, or a section `credit`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make the credit, and check that TRL provides its inputs."""
        tells = settings.get("environment_factory") or settings.get("rollout_func")
        hint = f"give an environment_factory or a rollout_func with {_STATES}"
        self._credit = host_credit("TRL", self.credit, {STATES: None if tells else hint})
        self._lengths: list[Lengths] = []
        super().__init__(*args, **settings)

    def _generate_single_turn(self, *args: Any, **settings: Any) -> Any:
        """Generate the next turn of each completion as TRL does, and store how much the environments have recorded.

        So the entries of a turn are known, also if the turn has several tool calls, or a call that TRL rejects.
        """
        worlds = self.environments or ()
        told = {name: [getattr(one, name, None) for one in worlds] for name in (_STATES, _REWARDS)}
        self._lengths.append(
            {name: [0 if each is None else len(each) for each in lists] for name, lists in told.items()}
        )
        return super()._generate_single_turn(*args, **settings)

    def _calculate_rewards(self, *args: Any) -> Tensor:
        """Compute rewards as TRL does, and store them, since TRL does not pass them to later methods."""
        self._rewards = super()._calculate_rewards(*args)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate completions as TRL does, and replace the advantages with the credit's [sequences, tokens]."""
        from accelerate.utils import gather_object

        self._lengths = []
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        spans = [turn_spans(row) for row in mask.tolist()]
        first = self.accelerator.process_index * len(spans)
        gathered = [
            (len(own), *self._recorded(at, row, own, first + at))
            for at, (own, row) in enumerate(zip(spans, inputs, strict=True))
        ]
        numbers = self._weigh(gather_object(gathered))  # groups may be spread over processes
        form = mask.to(output["advantages"].dtype)
        return {**output, "advantages": on_tokens(numbers[first : first + len(spans)], spans, form)}

    def _recorded(
        self, at: int, row: Mapping[str, Any], spans: Sequence[Span], number: int
    ) -> tuple[Sequence[Any] | None, Sequence[float] | None]:
        """Return the recorded rewards of an episode, and its states if the credit reads them, for each turn.

        More may be recorded than the completion has turns: TRL cuts off a tool's result that is too long, and may mask
        a whole completion.

        Args:
            at: Index of the episode in this process.
            row: Inputs of the episode.
            spans: Token ranges of the turns.
            number: Index of the episode in the batch of all processes.
        """
        states = self._told(at, row, _STATES) if self._credit.reads_states else None
        rewards = self._told(at, row, _REWARDS)
        return (
            None if states is None else fitted_states(states, spans, number),
            None if rewards is None else fitted_rewards(rewards, spans),
        )

    def _told(self, at: int, row: Mapping[str, Any], name: str) -> Sequence[Any] | None:
        """Return the list `name` that a rollout or its environment recorded [turns]; None if there is none.

        If TRL plays the episode, the state before a turn is the environment's last entry when the turn begins. The
        reward of a turn is the sum of the entries from there to the next turn. If there is no state before the first
        turn, the result is None.
        """
        if name in row:
            return list(row[name])
        told = None if self.environments is None else getattr(self.environments[at], name, None)
        if told is None or self.rollout_func is not None or not self._lengths:
            return told
        before = [of_all[name][at] for of_all in self._lengths]
        if name == _REWARDS:
            return [fsum(told[start:end]) for start, end in pairwise([0, *before[1:], len(told)])]
        return [told[count - 1] for count in before] if before[0] else None

    def _weigh(
        self, gathered: Sequence[tuple[int, Sequence[Any] | None, Sequence[float] | None]]
    ) -> list[list[float]]:
        """Return the weights of the episodes of all processes `[episodes][turns]`.

        As in TRL, an episode that no reward function scored gets 0.

        Args:
            gathered: Number of turns, state keys and turn rewards of each episode.
        """
        size = self.num_generations if self.model.training else self.num_generations_eval
        scores = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(1).tolist()
        scored = [at for at, lacks in enumerate(self._rewards.isnan().all(1).tolist()) if not lacks]
        numbers = [[0.0] * turns for turns, _, _ in gathered]
        episodes = []
        for at in scored:
            turns, states, earned = gathered[at]
            episodes.append(HostEpisode(str(at // size), [*[0.0] * (turns - 1), scores[at]], states, earned))
        for at, found in zip(scored, weigh_episodes(episodes, self._credit), strict=True):
            numbers[at] = found
        return numbers
