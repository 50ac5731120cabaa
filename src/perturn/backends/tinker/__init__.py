"""The backend `tinker`: a service of the Tinker API computes log-probabilities and steps; Perturn computes the loss."""
