"""MCTS-DPO: Monte Carlo tree search, and pairs of steps from the same node."""
