"""Rewards of a judge: its engine, its ratings of episodes, and its agreement with labels."""
