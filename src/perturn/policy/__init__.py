"""The policy as tensors: load a model, turn trajectories into tokens, compute log-probabilities."""
