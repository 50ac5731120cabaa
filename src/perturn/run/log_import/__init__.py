"""Import logs of model calls as trajectories and training rows."""
