"""Comparisons of methods over seeds and environments. Each cell is an ordinary run, and cells share equal stages."""
