"""Readers of training rows, rollouts and logs in the formats of other trainers and services."""
