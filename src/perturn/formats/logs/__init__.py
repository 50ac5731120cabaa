"""Logs of model calls, in the formats of clients, proxies and tracing services, as one neutral record a call."""
