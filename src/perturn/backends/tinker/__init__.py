"""Training through a service of the Tinker API, which computes log-probabilities and steps, but not the loss."""
