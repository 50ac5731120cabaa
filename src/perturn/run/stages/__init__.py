"""The stages of a run, which play, compute or train, and the checks before any work."""
