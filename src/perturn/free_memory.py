"""Return free memory to the operating system, since glibc and torch's GPU allocator keep it otherwise."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path
from typing import Any, ClassVar

import psutil

_LEAST, _MOST = 2**28, 2**30
"""Bounds of the free bytes that a process may keep. The limit is half of the bytes in use, within these bounds."""

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_other = 0
"""Bytes of the process that glibc does not manage, measured after the last trim: Python's objects, stacks, code."""


class _Counts(ctypes.Structure):
    """Result of glibc's `mallinfo2`; the fifth number is `hblkhd`, and the eighth is `uordblks`."""

    _fields_: ClassVar = [("numbers", ctypes.c_size_t * 10)]


def release_memory() -> None:
    """Collect garbage and return all free memory, so that the next stage starts with little memory.

    The KV caches of a thousand conversations leave 2 GB of small free blocks, which glibc keeps until it is trimmed.
    """
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():  # without torch, this process uses no GPU
        torch.cuda.empty_cache()
    _trim()


def set_heap_aside() -> None:
    """Exclude all existing objects, such as imported modules, from garbage collection.

    This is for a process that does a single run: scanning a million objects after each stage takes longer than some
    stages. An excluded object is freed when its last reference is deleted, but not if it is part of a cycle.
    """
    gc.collect()
    gc.freeze()


def return_waste() -> None:
    """Return free memory to the operating system if there is much of it; call this when a pass uses the most memory.

    Activations of varying sizes fragment glibc's memory, so that a process may hold twice the memory in use. Memory
    that is free at the peak of a pass is not needed later in the pass, so it is returned. Memory that is free between
    two passes is used by the next pass, so it is kept. Returning memory too often slows training by up to 50 %, since
    the system clears returned pages.

    This needs glibc 2.33 or later, and does nothing with other C libraries.
    """
    used = _used()
    if used and _held() - used - _other > min(max(_LEAST, used // 2), _MOST):
        _trim()


def _trim() -> None:
    global _other
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
        _other = _held() - _used()


def _used() -> int:
    """Return the bytes in use by glibc's count; 0 with another C library."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    _libc.mallinfo2.restype = _Counts
    numbers = _libc.mallinfo2().numbers
    return int(numbers[4] + numbers[7])


def _held() -> int:
    """Return the resident bytes of this process, without mapped files and shared memory."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def memory_in_use() -> int:
    """Return the resident memory of this process and its child processes, in bytes."""
    total = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # the process has ended
            continue
    return total
