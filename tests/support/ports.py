"""Ports for servers of tests."""

import socket


def free_port() -> str:
    """Return a port on which no process listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])
