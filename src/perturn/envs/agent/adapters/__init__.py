"""Adapters: each is run by its path in the interpreter of its library, and imports nothing of Perturn."""
