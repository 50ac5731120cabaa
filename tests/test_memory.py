import sys

import pytest
import torch

from turnwise import memory
from turnwise.memory import Growth, release_memory

MEGABYTE = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's memory")


@pytest.fixture
def before():
    """What the process holds, when what earlier tests have freed is returned."""
    release_memory()
    return memory._resident()


def fragments(megabytes):
    """So much memory is freed in small blocks, which glibc keeps; every 100th block stays in use."""
    blocks = [torch.ones(4096) for _ in range(megabytes * MEGABYTE // 16_384)]
    return blocks[::100]


def test_resident_memory_is_measured_in_bytes(before):
    held = torch.ones(64 * MEGABYTE)

    assert held.nbytes * 0.9 < memory._resident() - before < held.nbytes * 1.5


def test_free_memory_is_returned_when_the_process_has_grown(before, monkeypatch):
    """200 MB of free fragments stay with the process until it has grown by the bound, and only then go."""
    monkeypatch.setattr(memory, "_GROWTH", 100 * MEGABYTE)
    growth = Growth()
    kept = fragments(200)
    grown = memory._resident()
    growth.bound()

    assert kept
    assert grown - before > 150 * MEGABYTE
    assert memory._resident() - before < 50 * MEGABYTE


def test_a_process_that_has_not_grown_is_left_alone(monkeypatch):
    growth = Growth()
    monkeypatch.setattr(memory, "_trim", lambda: pytest.fail("looked through for nothing"))
    growth.bound()


def test_released_memory_is_back(before):
    kept = fragments(200)
    grown = memory._resident() - before
    release_memory()

    assert kept
    assert grown > 150 * MEGABYTE
    assert memory._resident() - before < 50 * MEGABYTE
