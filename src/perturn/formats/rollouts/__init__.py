"""Read rollouts that other trainers write."""
