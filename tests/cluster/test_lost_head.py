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


PROGRAM = """
import threading, types
from perturn.cluster import ray_connection
ray_connection.HEAD_S, ray_connection.LOOK_S = 0.1, 0.02
context = types.SimpleNamespace(gcs_address="127.0.0.1:{port}")
ray = types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
threading.Thread(target=ray_connection._end_without_head, args=(ray,), daemon=True).start()
threading.Event().wait(60)
"""


def test_the_process_ends_with_an_error_although_its_main_thread_is_blocked():
    """Its exit code is that of a mistake of the user's side, as for other errors."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(port=port)], capture_output=True, text=True, timeout=50
    )

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the cluster is lost: its head at 127.0.0.1:{port}")
