"""Protocols of model providers, as an endpoint speaks them."""
