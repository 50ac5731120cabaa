"""Small decision processes whose episodes can all be listed, on which `meter` measures a credit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, fsum

import torch
from torch import Tensor

from perturn.types import Action, Task, Trajectory, Turn


@dataclass(frozen=True)
class Outcome:
    """One possible outcome of an action."""

    probability: float = 1.0
    reward: float = 0.0
    to: int | None = None
    """Next state; None: the episode ends."""
    success: bool = False


@dataclass(frozen=True)
class Process:
    """Decision process with a softmax policy. Episodes start in state 0."""

    name: str
    actions: Mapping[int, Mapping[str, tuple[Outcome, ...]]]
    """State -> action -> possible outcomes of the action."""
    logits: Mapping[int, tuple[float, ...]]
    """State -> logit of each action under the policy; gradients are taken with respect to these logits."""
    horizon: int
    """Largest number of turns of an episode."""

    @cached_property
    def episodes(self) -> "Episodes":
        """All episodes of the process under its policy."""
        return Episodes(self)

    @cached_property
    def prover(self) -> "Process":
        """The same process with a policy that takes all actions of a state with equal probability."""
        return replace(self, logits={state: (0.0,) * len(own) for state, own in self.logits.items()})

    @cached_property
    def turns_to_success(self) -> dict[int, int]:
        """State -> smallest number of turns to a success, for all states from which a success is possible."""
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
    """Index of the action among the actions of the state."""
    reward: float


class Episodes:
    """All episodes of a process, with their probabilities, the score of each turn, and the value of each state."""

    def __init__(self, process: Process) -> None:
        """List all episodes of the process."""
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
        """Probability of each episode under the policy [episodes]."""
        self.score = torch.zeros(len(self.steps), process.horizon, self.parameters, dtype=torch.float64)
        """Gradient of log pi(action | state) at each turn; 0 after the end [episodes, turns, parameters]."""
        for i, steps in enumerate(self.steps):
            for t, step in enumerate(steps):
                self.score[i, t] = self._score(step)

    def _extend(self, steps: list[Step], state: int, probability: float, found: list[float]) -> None:
        """List all continuations of an unfinished episode, given its steps, its next state and its probability."""
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
        """Return the exact expected return from a state at a turn, in units of reward."""
        if turn == self.process.horizon:
            return 0.0
        return fsum(
            chosen * self.action_value(Step(state, action, 0.0), turn, gamma)
            for action, chosen in enumerate(self.process.policy(state))
        )

    def action_value(self, step: Step, turn: int, gamma: float) -> float:
        """Return the exact expected return of an action in a state at a turn, in units of reward."""
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
        """Return the exact value of each turn's state, in units of reward, one tensor per episode [turns].

        Args:
            gamma: Discount from one turn to the next.
            player: Episodes of the policy whose values are returned; None: this object's policy.
        """
        value = (player or self).value
        return [
            torch.tensor([value(step.state, t, gamma) for t, step in enumerate(steps)], dtype=torch.float64)
            for steps in self.steps
        ]

    def chance(self, state: int, turn: int) -> float:
        """Return the exact probability that an episode in this state, at this turn, ends with a success."""
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
        """Return an episode as a recorded trajectory.

        Args:
            episode: Index of the episode.
            sample: Sample number of the trajectory.
        """
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
"""Processes on which `perturn check-credit` measures a credit.

- loop: a state that is visited again, and a reward at the end.
- neutral loop: as loop, with a bonus for staying. Staying is worth about as much as finishing, so a small bias changes
  the sign of the gradient.
- fork: branches of unequal length and difficulty.
- shared end: two paths lead to the same late state.
"""
