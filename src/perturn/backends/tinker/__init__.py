"""Training through a service of the Tinker API: the loss is ours, log-probabilities and steps are the service's."""
