"""Input and output: bounded reading of outside data, and atomic writing of files."""
