"""Show the progress of a run in the terminal."""
