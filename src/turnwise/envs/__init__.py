"""Adapters to environments, one file each. Add yours to ENVIRONMENTS."""
