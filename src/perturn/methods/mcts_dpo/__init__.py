"""MCTS-DPO: tree search, and pairs of siblings."""
