"""Data of other trainers and of users, read as rows of training."""
