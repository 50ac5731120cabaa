"""Models: loading, conversion of trajectories to packed batches, log-probabilities and value heads."""
