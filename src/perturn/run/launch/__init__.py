"""Trainings in several processes of this machine, which the driver of a run starts with torchrun and follows."""
