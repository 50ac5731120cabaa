"""Read logs of model calls, in the formats of clients, proxies and tracing services, as neutral records of calls."""
