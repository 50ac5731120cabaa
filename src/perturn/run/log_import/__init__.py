"""Logs of model calls -> trajectories, and rows of training made of them."""
