import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from perturn import free_memory
from perturn.free_memory import release_memory, return_waste
from perturn.policy.head import Head, token_logprobs

MEGABYTE = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's memory")


@pytest.fixture
def before():
    """What the process holds, when what earlier tests have freed is returned."""
    release_memory()
    return free_memory._held()


def fragments(megabytes):
    """So much memory is freed in small blocks, which glibc keeps; every 100th block stays in use."""
    blocks = [torch.ones(4096) for _ in range(megabytes * MEGABYTE // 16_384)]
    return blocks[::100]


def mapped_files():
    """Bytes of files in this process's memory, as the kernel counts them where it does."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE


@pytest.fixture
def measured(monkeypatch):
    """Bytes in use and held, as a test sets them in GB; and how often memory was returned."""
    state = {"used": 0.0, "held": 0.0, "returned": 0}
    monkeypatch.setattr(free_memory, "_used", lambda: int(state["used"] * 2**30))
    monkeypatch.setattr(free_memory, "_held", lambda: int(state["held"] * 2**30))
    monkeypatch.setattr(free_memory, "_trim", lambda: state.update(returned=state["returned"] + 1))
    monkeypatch.setattr(free_memory, "_other", 2**29)
    return state


def test_held_and_used_memory_are_measured_in_bytes(before):
    used = free_memory._used()
    block = torch.ones(64 * MEGABYTE)

    assert block.nbytes * 0.9 < free_memory._held() - before < block.nbytes * 1.5
    assert block.nbytes * 0.99 < free_memory._used() - used < block.nbytes * 1.1


def test_memory_that_files_share_is_not_held(before, tmp_path):
    """64 MB of a mapped file, read through."""
    files = mapped_files()
    (tmp_path / "file").touch()
    os.truncate(
        tmp_path / "file", 64 * MEGABYTE
    )  # without a block of this size in memory, which may stay held
    mapped = torch.from_file(str(tmp_path / "file"), size=64 * MEGABYTE, dtype=torch.uint8)

    assert mapped.sum() == 0
    if mapped_files() - files < 32 * MEGABYTE:
        pytest.skip("this system does not count pages of files apart")
    assert free_memory._held() - before < 32 * MEGABYTE


@pytest.mark.parametrize(
    ("used", "free", "returned"),
    [(0.1, 0.2, 0), (0.1, 0.3, 1), (1.0, 0.4, 0), (1.0, 0.6, 1), (8.0, 0.9, 0), (8.0, 1.1, 1)],
)
def test_waste_is_returned_beyond_half_of_what_is_in_use(measured, used, free, returned):
    """A quarter of a gigabyte is always allowed, and never more than one; half a gigabyte here is not glibc's."""
    measured.update(used=used, held=used + free + 0.5)
    return_waste()

    assert measured["returned"] == returned


def test_nothing_happens_where_use_is_not_counted(measured):
    """An older glibc, or another library."""
    measured.update(used=0.0, held=50.0)
    return_waste()

    assert measured["returned"] == 0


def test_returned_waste_is_back(before, monkeypatch):
    """200 MB of free fragments, where 100 MB are allowed; and a second call finds none."""
    monkeypatch.setattr(free_memory, "_LEAST", 100 * MEGABYTE)
    monkeypatch.setattr(free_memory, "_MOST", 100 * MEGABYTE)
    kept = fragments(200)
    grown = free_memory._held() - before
    return_waste()
    left = free_memory._held() - before
    monkeypatch.setattr(free_memory, "_trim", lambda: pytest.fail("there is nothing to return"))
    return_waste()

    assert kept
    assert grown > 150 * MEGABYTE
    assert left < 50 * MEGABYTE


def test_released_memory_is_back(before):
    kept = fragments(200)
    grown = free_memory._held() - before
    release_memory()

    assert kept
    assert grown > 150 * MEGABYTE
    assert free_memory._held() - before < 50 * MEGABYTE


def test_the_output_layer_asks_once_a_pass_where_most_is_held(monkeypatch):
    """At the start of the backward pass, or in a forward pass that has none."""
    asked = []
    monkeypatch.setattr("perturn.policy.head.return_waste", lambda: asked.append(True))
    hidden, head = torch.ones(3, 4, requires_grad=True), Head(torch.ones(7, 4))
    found, _ = token_logprobs(hidden, torch.tensor([1, 2, 3]), head)
    forward = len(asked)
    found.sum().backward()
    backward = len(asked)
    with torch.no_grad():
        token_logprobs(hidden, torch.tensor([1, 2, 3]), head)

    assert (forward, backward, len(asked)) == (0, 1, 2)
