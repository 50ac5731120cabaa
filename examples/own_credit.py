"""Credit of your own: compute the weights of turns with it, and compare it with RLOO.

    python examples/own_credit.py
    perturn check-credit examples/own_credit.py:PayNews

In a recipe, use the class with `credit: {name: "examples/own_credit.py:PayNews"}`. `perturn check-credit` computes its
exact bias.
"""

from dataclasses import dataclass
from typing import Annotated

import perturn
from perturn.extend import Bound
from perturn.extend.tensors import RLOO, GroupCredit, as_tensors
from perturn.types import Sampling

GAMES = {"name": "alfworld-like", "kinds": ["look_at_obj_in_light"]}


@dataclass(frozen=True)
class PayNews(GroupCredit):
    """RLOO's advantage, times a factor at turns whose observation was not seen before in the episode."""

    factor: Annotated[float, Bound(above=0)] = 2.0
    """Factor on the advantage of a turn with a new observation, without unit; > 0."""

    def __call__(self, group, **_):
        weights = []
        for episode, advantages in zip(group, RLOO(returns=self.returns)(group), strict=True):
            seen = set()
            weights.append([])
            for turn, advantage in zip(episode.turns, advantages.tolist(), strict=True):
                text = turn.observation[-1]["content"]
                weights[-1].append(advantage * (1 if text in seen else self.factor))
                seen.add(text)
        return as_tensors(weights)


def main(tasks=4, samples=4):
    """Play groups of episodes, compute both credits, and print one episode turn by turn."""
    how = Sampling(temperature=1.0, max_new_tokens=16)
    play = {"n": tasks, "samples": samples, "protocol": "alfworld-lab", "sampling": how}
    played = perturn.collect("tiny-agent", GAMES, **play)
    rloo, own = perturn.weigh(played, "rloo"), perturn.weigh(played, PayNews())
    for first, second in zip(rloo, own, strict=True):
        if any(first.weight):  # all weights are 0 where the samples of a task have equal rewards
            print(f"task {first.trajectory.task.id}, reward {first.trajectory.total_reward:g}")
            print("  rloo    own  action")
            for turn, *weights in zip(first.trajectory.turns, first.weight, second.weight, strict=True):
                print(f"{weights[0]:+6.2f} {weights[1]:+6.2f}  {turn.action.text}")
            break
    return rloo, own


if __name__ == "__main__":
    main()
