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
    """What the first pass leaves stays; 200 MB of free fragments beyond it go once they exceed the bound."""
    monkeypatch.setattr(memory, "_GROWTH", 100 * MEGABYTE)
    growth = Growth()
    first = fragments(200)
    growth.bound()
    usual = memory._resident()
    second = fragments(400)
    grown = memory._resident()
    growth.bound()

    assert first
    assert second
    assert usual - before > 150 * MEGABYTE
    assert grown - usual > 150 * MEGABYTE
    assert memory._resident() - before < 50 * MEGABYTE


def test_a_process_that_has_not_grown_is_left_alone(monkeypatch):
    """This one, twice in a row: it is not looked through for free memory."""
    returned = []
    monkeypatch.setattr(memory, "_trim", lambda: returned.append(True))
    growth = Growth()
    growth.bound()
    growth.bound()

    assert growth._usual > 0
    assert returned == []


def test_what_the_pass_after_a_return_leaves_is_usual_again(monkeypatch):
    """1 GB, 2 GB and a half: returned; 3 GB are usual then, and 3 and a half no reason."""
    held, returned = iter([1.0, 2.5, 3.0, 3.5, 4.5]), []
    monkeypatch.setattr(memory, "_resident", lambda: int(next(held) * 2**30))
    monkeypatch.setattr(memory, "_trim", lambda: returned.append(True))
    growth = Growth()
    counts = []
    for _ in range(5):
        growth.bound()
        counts.append(len(returned))

    assert counts == [0, 1, 1, 1, 2]


def test_released_memory_is_back(before):
    kept = fragments(200)
    grown = memory._resident() - before
    release_memory()

    assert kept
    assert grown > 150 * MEGABYTE
    assert memory._resident() - before < 50 * MEGABYTE
