"""The stages of a run: each plays, computes or trains one thing, and its checks before work."""
