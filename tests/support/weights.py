"""Weights of turns as tensors."""

import torch

import perturn


def weights_of(*episodes, dtype=torch.float64, **settings):
    """Return what `perturn.weigh` says of each turn, one tensor per trajectory [turns]."""
    return [torch.tensor(row.weight, dtype=dtype) for row in perturn.weigh(*episodes, **settings)]
