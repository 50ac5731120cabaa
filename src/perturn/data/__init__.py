"""Files of trajectories, pairs and credits, and the run folder."""
