"""Progress of a run in the terminal."""
