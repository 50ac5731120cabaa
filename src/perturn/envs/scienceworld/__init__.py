"""ScienceWorld with its own Java."""
