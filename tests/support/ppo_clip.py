"""Sampled sides, and nested lists of single trajectories, for tests of the clipped policy gradient."""

import dataclasses

import torch

from perturn.losses import TurnLogprobs


def sampled(make_side, seed=5, lengths=((2, 1, 3), (4,), (1, 2)), dtype=torch.float64):
    """Return a sampled batch with weights of both signs. The policies are close together and away from clip corners."""
    side = make_side(seed, [list(turns) for turns in lengths], dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    noise = 0.3 * torch.randn(len(side.policy), generator=generator, dtype=torch.float64)
    weight = torch.randn(side.num_turns, generator=generator, dtype=torch.float64)
    further = 0.3 * torch.randn(len(side.policy), generator=generator, dtype=torch.float64)
    behavior, proximal = ((side.policy + each).to(dtype) for each in (noise, further))
    return dataclasses.replace(side, behavior=behavior, proximal=proximal, weight=weight)


def with_policy(side, policy):
    """Return the batch with another policy."""
    return dataclasses.replace(side, policy=policy)


def nested(policy, behavior, weight, proximal=None, **more):
    """Return a batch of log-probabilities in float64, in nats."""

    def deep(value):
        return [[torch.tensor(turn, dtype=torch.float64) for turn in turns] for turns in value]

    return TurnLogprobs.from_nested(
        deep(policy),
        weight=[torch.tensor(w, dtype=torch.float64) for w in weight],
        behavior=deep(behavior),
        proximal=None if proximal is None else deep(proximal),
        **more,
    )
