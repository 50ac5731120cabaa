"""Find free ports for the servers of benchmarks."""

import socket


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
