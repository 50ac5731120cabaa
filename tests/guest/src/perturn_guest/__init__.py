"""Entries of somebody else's package, which imports `perturn.extend` alone."""
