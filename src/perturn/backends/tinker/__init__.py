"""Training through a service of the Tinker API, which computes log-probabilities and steps; the loss is computed here."""
