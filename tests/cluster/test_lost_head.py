"""A head that is lost ends the command with an error that says what to do."""

import socket
import subprocess
import sys

import pytest

from perturn.cluster import ray_connection
from perturn.cluster.ray_connection import lost_head


@pytest.fixture
def soon(monkeypatch):
    """Give a head up within a moment."""
    monkeypatch.setattr(ray_connection, "HEAD_S", 0.2)
    monkeypatch.setattr(ray_connection, "LOOK_S", 0.02)


def test_a_head_that_ends_is_lost(soon):
    """The watch does not end while the head answers."""
    looks, server = [], socket.create_server(("127.0.0.1", 0))

    def address():
        looks.append(f"127.0.0.1:{server.getsockname()[1]}" if len(looks) < 30 else looks[0])
        if len(looks) == 30:
            server.close()
        return looks[-1]

    said = lost_head(address)

    assert len(looks) > 30
    assert said.startswith(f"the cluster is lost: its head at {looks[0]} has not answered for ")
    assert said.endswith("run the same command again.")


def test_a_process_that_has_left_the_cluster_loses_no_head(soon):
    """An address where nothing listens is looked at no more after that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    left = iter([f"127.0.0.1:{port}", None])

    assert lost_head(lambda: next(left)) is None
    assert next(left, "no more") == "no more"


def test_a_head_that_has_never_answered_is_not_lost(soon):
    """A firewall may hide it from this look alone; the process goes on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    looks = iter([f"127.0.0.1:{port}"] * 30 + [None])

    assert lost_head(lambda: next(looks)) is None


def test_an_address_of_ipv6_is_looked_at(soon):
    """Ray writes it in brackets."""
    looks = []
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]

        def address():
            looks.append(f"[::1]:{port}")
            if len(looks) == 9:
                server.close()
            return looks[-1]

        assert f"its head at [::1]:{port} has not answered" in lost_head(address)


PROGRAM = """
import socket, threading, types
from perturn.cluster import ray_connection
ray_connection.HEAD_S, ray_connection.LOOK_S = 0.1, 0.02
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
threading.Timer(0.5, server.close).start()
context = types.SimpleNamespace(gcs_address=f"127.0.0.1:{port}")
ray = types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
threading.Thread(target=ray_connection._end_without_head, args=(ray,), daemon=True).start()
threading.Event().wait(60)
"""


def test_the_process_ends_with_an_error_although_its_main_thread_is_blocked():
    """Its exit code is that of a mistake of the user's side, as for other errors."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50)

    assert done.returncode == 2
    assert done.stderr.startswith("error: the cluster is lost: its head at 127.0.0.1:")
