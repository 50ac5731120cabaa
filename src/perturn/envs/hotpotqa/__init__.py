"""HotpotQA: search, lookup and finish over a local index."""
