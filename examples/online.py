"""A complete method of online learning: play, compute the credit of turns, train, and repeat. Change any part of it.

    python examples/online.py

The policy is `tiny-agent` from the package, the games are from `alfworld-like`, and the class below is the credit. The
script takes a minute on a laptop. It shows how the parts fit together, and is too short for a better score.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

import perturn
from perturn.extend.tensors import CreditTraits
from perturn.types import Sampling

ITERATIONS, TASKS, SAMPLES, HELD_OUT = 3, 8, 4, 20
GAMES = {"name": "alfworld-like", "kinds": ["look_at_obj_in_light"]}  # or a class of yours: see text_game.py
RULES = "alfworld-lab"


@dataclass(frozen=True)
class LateTurns:
    """Advantage of an episode over the mean reward of its group. Later turns get more weight."""

    needs: ClassVar[tuple[str, ...]] = ()  # such as ("entropy",), which is then passed as an argument
    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)

    gamma: float = 0.9

    def __call__(self, group, **needed):
        """Return one tensor for each trajectory [turns]."""
        mean = sum(one.total_reward for one in group) / len(group)
        left = [torch.arange(len(one.turns)).flip(0) for one in group]
        return [(one.total_reward - mean) * self.gamma**each for one, each in zip(group, left, strict=True)]


def main(iterations=ITERATIONS, tasks=TASKS, samples=SAMPLES, held_out=HELD_OUT):
    """Train for some iterations, and score the policy before and after."""
    model = perturn.load_model("tiny-agent")
    how = Sampling(temperature=1.0, max_new_tokens=16)
    trainer = perturn.Trainer(model, loss="ppo-clip", learning_rate=1e-4, token_budget=4096)
    before = perturn.evaluate(model, GAMES, split="valid_seen", n=held_out, protocol=RULES)
    for iteration in range(1, iterations + 1):
        play = {"n": tasks, "skip": (iteration - 1) * tasks, "samples": samples, "iteration": iteration}
        explored = perturn.collect(trainer.model, GAMES, protocol=RULES, sampling=how, **play)
        rows = perturn.make_rows(explored, "groups", credit=LateTurns())
        loss = trainer.train(rows).get("loss", 0)
        solved = sum(one.success for one in explored)
        print(f"{iteration}: {solved} of {len(explored)} solved, {len(rows)} rows, loss {loss:.4f}")
    after = perturn.evaluate(trainer.model, GAMES, split="valid_seen", n=held_out, protocol=RULES)
    print(f"success on {after.n} held-out games: {before.success_rate:.2f}, then {after.success_rate:.2f}")
    return trainer


if __name__ == "__main__":
    main()
