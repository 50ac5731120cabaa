"""Row makers: how episodes become rows of training data."""
