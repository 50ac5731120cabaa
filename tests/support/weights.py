"""Weights of turns as tensors."""

import torch

import perturn


def weights_of(*episodes, dtype=torch.float64, **settings):
    """Return the weights of `perturn.weigh`, one tensor for each trajectory [turns]."""
    return [torch.tensor(row.weight, dtype=dtype) for row in perturn.weigh(*episodes, **settings)]
