"""Quantities of episodes that credits and other entries read, one file each."""
