"""Trajectories, pairs and groups on disk, TRL's format, and the run folder."""
