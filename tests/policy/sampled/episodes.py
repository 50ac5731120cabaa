"""Episodes with the tokens and log-probabilities that a policy sampled, and what a training on them leaves."""

from dataclasses import replace

import torch

from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out
from perturn.types import Action, Task, Trajectory, Turn, WeightedTrajectory

WORDS = ["north", "south", "east", "west", "up", "down", "lamp", "door", "key", "box"]


def play(model, renderer, said, *, task="t/0", reward=0.0, noise=0.0, policy="p"):
    """An episode of these actions, with the tokens and log-probabilities that a policy near the model has of them."""
    turns = [Turn(({"role": "user", "content": f"room {i}"},), Action(text)) for i, text in enumerate(said)]
    bare = Trajectory(
        Task(task),
        tuple(turns),
        prompt=({"role": "system", "content": "Play."},),
        policy=policy,
        total_reward=reward,
    )
    encoded = renderer.encode(bare)
    with torch.no_grad():
        logprobs = action_logprobs(model, lay_out([encoded]))
    logprobs += noise * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(len(said)))
    of = torch.tensor(encoded.loss_turns)
    ids = torch.tensor([token for token, turn in zip(encoded.ids, encoded.turn, strict=True) if turn >= 0])
    actions = [
        Action(text, tuple(ids[of == i].tolist()), tuple(logprobs[of == i].tolist()))
        for i, text in enumerate(said)
    ]
    return replace(
        bare, turns=tuple(replace(turn, action=action) for turn, action in zip(turns, actions, strict=True))
    )


def weighted(rows, *values):
    """Each row with these weights, as many as it has turns, from one list after the other."""
    return [
        WeightedTrajectory(row, tuple(values[i % len(values)][: len(row.turns)]))
        for i, row in enumerate(rows)
    ]


def history(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
