"""Files of rollouts that other trainers write."""
