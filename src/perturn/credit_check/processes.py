"""Small decision processes whose episodes can all be listed: the ground on which `meter` measures a credit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, fsum

import torch
from torch import Tensor

from perturn.types import Action, Task, Trajectory, Turn


@dataclass(frozen=True)
class Outcome:
    """Something that can follow an action."""

    probability: float = 1.0
    reward: float = 0.0
    to: int | None = None
    """The next state; None: the episode ends."""
    success: bool = False


@dataclass(frozen=True)
class Process:
    """States, the actions of each with a logit under a softmax policy, and the outcomes; it begins in state 0."""

    name: str
    actions: Mapping[int, Mapping[str, tuple[Outcome, ...]]]
    """For each state, the outcomes of each action."""
    logits: Mapping[int, tuple[float, ...]]
    """For each state, a logit for each action; gradients are taken with respect to these logits."""
    horizon: int

    @cached_property
    def episodes(self) -> "Episodes":
        """All episodes."""
        return Episodes(self)

    @cached_property
    def prover(self) -> "Process":
        """The process under a policy that takes all actions of a state with equal probability."""
        return replace(self, logits={state: (0.0,) * len(own) for state, own in self.logits.items()})

    @cached_property
    def turns_to_success(self) -> dict[int, int]:
        """Least number of turns to a success, by state, with the best outcomes; of states that can succeed."""
        found: dict[int, int] = {}
        for turns in range(1, len(self.actions) + 1):
            reached = {
                state
                for state, actions in self.actions.items()
                for outcomes in actions.values()
                for outcome in outcomes
                if outcome.success or (outcome.to in found)
            }
            found |= dict.fromkeys(reached - found.keys(), turns)
        return found

    def policy(self, state: int) -> list[float]:
        """Return the probability of each action of a state."""
        weights = [exp(logit) for logit in self.logits[state]]
        return [weight / fsum(weights) for weight in weights]


@dataclass(frozen=True)
class Step:
    """A turn of an episode of a process."""

    state: int
    action: int
    """Index among the actions of the state."""
    reward: float


class Episodes:
    """All episodes of a process: their probabilities, the score of each turn, and the value of each state."""

    def __init__(self, process: Process) -> None:
        """List them."""
        self.process = process
        self._offset, self.parameters = {}, 0
        for state, logits in process.logits.items():
            self._offset[state] = self.parameters
            self.parameters += len(logits)
        self.steps: list[list[Step]] = []
        self.ends: list[Outcome] = []
        probabilities: list[float] = []
        self._extend([], 0, 1.0, probabilities)
        self.probability = torch.tensor(probabilities, dtype=torch.float64)
        """Values, one per episode [episodes]."""
        self.score = torch.zeros(len(self.steps), process.horizon, self.parameters, dtype=torch.float64)
        """Gradient of log pi of each turn's action; 0 after the end [episodes, turns, parameters]."""
        for i, steps in enumerate(self.steps):
            for t, step in enumerate(steps):
                self.score[i, t] = self._score(step)

    def _extend(self, steps: list[Step], state: int, probability: float, found: list[float]) -> None:
        """List the episodes that go on from a state."""
        for index, (chosen, outcomes) in enumerate(
            zip(self.process.policy(state), self.process.actions[state].values(), strict=True)
        ):
            for outcome in outcomes:
                after = [*steps, Step(state, index, outcome.reward)]
                weight = probability * chosen * outcome.probability
                if outcome.to is None or len(after) == self.process.horizon:
                    self.steps.append(after)
                    self.ends.append(outcome)
                    found.append(weight)
                else:
                    self._extend(after, outcome.to, weight, found)

    def _score(self, step: Step) -> Tensor:
        score = torch.zeros(self.parameters, dtype=torch.float64)
        chances = torch.tensor(self.process.policy(step.state), dtype=torch.float64)
        first = self._offset[step.state]
        score[first : first + len(chances)] = -chances
        score[first + step.action] += 1
        return score

    def value(self, state: int, turn: int, gamma: float) -> float:
        """Return the exact value of a state at a turn, in units of reward."""
        if turn == self.process.horizon:
            return 0.0
        return fsum(
            chosen * self.action_value(Step(state, action, 0.0), turn, gamma)
            for action, chosen in enumerate(self.process.policy(state))
        )

    def action_value(self, step: Step, turn: int, gamma: float) -> float:
        """Return the exact value of an action of a state at a turn, whatever follows it, in units of reward."""
        outcomes = list(self.process.actions[step.state].values())[step.action]
        return fsum(
            outcome.probability
            * (
                outcome.reward
                + (gamma * self.value(outcome.to, turn + 1, gamma) if outcome.to is not None else 0.0)
            )
            for outcome in outcomes
        )

    def values(self, gamma: float, player: "Episodes | None" = None) -> list[Tensor]:
        """Return the exact value of the state of each turn of each episode [turns].

        Args:
            gamma: Discount from one turn to the next.
            player: Episodes under another policy, whose values they are then; None: this one.
        """
        value = (player or self).value
        return [
            torch.tensor([value(step.state, t, gamma) for t, step in enumerate(steps)], dtype=torch.float64)
            for steps in self.steps
        ]

    def chance(self, state: int, turn: int) -> float:
        """Return the exact chance that an episode ends with a success from a state at a turn on."""
        return fsum(
            chosen * outcome.probability * (1.0 if outcome.success else self._chance_after(outcome, turn))
            for chosen, outcomes in zip(
                self.process.policy(state), self.process.actions[state].values(), strict=True
            )
            for outcome in outcomes
        )

    def _chance_after(self, outcome: Outcome, turn: int) -> float:
        if outcome.to is None or turn + 1 == self.process.horizon:
            return 0.0
        return self.chance(outcome.to, turn + 1)

    def gradient(self, gamma: float) -> Tensor:
        """Return the exact gradient of the expected sum of gamma^t r_t [parameters]."""
        returns = torch.tensor(
            [fsum(gamma**t * step.reward for t, step in enumerate(steps)) for steps in self.steps],
            dtype=torch.float64,
        )
        return torch.einsum("e,etp->p", self.probability * returns, self.score)

    def trajectory(self, episode: int, sample: int) -> Trajectory:
        """Return an episode as it would be recorded."""
        names = {state: list(actions) for state, actions in self.process.actions.items()}
        turns = tuple(
            Turn(
                ({"role": "user", "content": str(step.state)},),
                Action(names[step.state][step.action]),
                step.reward,
                state_key=str(step.state),
            )
            for step in self.steps[episode]
        )
        end = self.ends[episode]
        return Trajectory(
            Task(self.process.name),
            turns,
            total_reward=fsum(turn.reward for turn in turns),
            success=end.success,
            terminated=end.to is None,
            truncated=end.to is not None,
            sample=sample,
        )


def _win(probability: float) -> tuple[Outcome, ...]:
    return (Outcome(probability, 1.0, success=True), Outcome(1 - probability))


PROCESSES: tuple[Process, ...] = (
    Process(
        "loop",
        {0: {"finish": _win(0.5), "stay": (Outcome(to=0),), "give up": (Outcome(),)}},
        {0: (0.2, 0.4, -0.1)},
        horizon=3,
    ),
    Process(
        "neutral loop",
        {0: {"finish": (Outcome(reward=1.0, success=True),), "stay": (Outcome(reward=0.3, to=0),)}},
        {0: (0.2, 0.4)},
        horizon=3,
    ),
    Process(
        "fork",
        {
            0: {"near": (Outcome(to=1),), "far": (Outcome(to=2),)},
            1: {"try": _win(0.7), "stop": (Outcome(),)},
            2: {"go on": (Outcome(to=1),), "stop": (Outcome(reward=0.4),)},
        },
        {0: (0.1, -0.1), 1: (0.0, 0.2), 2: (0.3, 0.0)},
        horizon=4,
    ),
    Process(
        "shared end",
        {
            0: {"left": (Outcome(to=1),), "right": (Outcome(reward=0.2, to=2),)},
            1: {"go on": (Outcome(to=3),), "stop": (Outcome(reward=0.5),)},
            2: {"go on": (Outcome(to=3),), "stop": (Outcome(),)},
            3: {"try": _win(0.6), "settle": (Outcome(reward=0.3),)},
        },
        {0: (0.2, -0.1), 1: (0.3, 0.0), 2: (0.1, 0.2), 3: (0.0, 0.4)},
        horizon=3,
    ),
)
"""A state that is revisited, with a reward for the outcome; the same with a bonus that makes a turn more worth about as
much as finishing, so that little turns the sign; branches of unequal length and difficulty; a late state that two paths
share."""
