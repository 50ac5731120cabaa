"""Give free memory back to the system: glibc and torch's allocator on a GPU keep freed memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path
from typing import Any, ClassVar

import psutil

_LEAST, _MOST = 2**28, 2**30
"""Bounds of the free bytes that a process may hold in addition to the bytes in use; between them, half of the bytes in
use."""

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_other = 0
"""Bytes that the process held after the last return although glibc knew of no use: Python's objects, stacks, code."""


class _Counts(ctypes.Structure):
    """Result of glibc's `mallinfo2`: `hblkhd` is the fifth number, `uordblks` the eighth."""

    _fields_: ClassVar = [("numbers", ctypes.c_size_t * 10)]


def release_memory() -> None:
    """Free the memory of models that are gone, so that the next stage does not add to it.

    Keys and values of a thousand conversations leave 2 GB of small free blocks, which glibc keeps until asked.
    """
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():  # without torch there is nothing on a GPU
        torch.cuda.empty_cache()
    _trim()


def set_heap_aside() -> None:
    """Let the garbage collector skip all objects that exist now, such as objects of imported modules.

    For a process that does nothing but one run: looking through a million objects after each stage takes longer than
    many a stage. What is set aside is freed when its last reference goes, but not if it is part of a cycle.
    """
    gc.collect()
    gc.freeze()


def return_waste() -> None:
    """Return free memory to the operating system, if there is much of it; call it where work on the CPU holds the most.

    Activations of ever different sizes fragment the memory that glibc keeps, which then is twice the memory in use.
    Memory that is free at the height of a pass serves none of its later parts. Memory that is free between two passes
    serves the next. Returning memory, or each large block at once, makes training up to 50 % slower, since the system
    clears the pages each time.

    Needs glibc 2.33 or later; elsewhere nothing happens.
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
    """Return bytes in use, as counted by glibc; 0 with another C library."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    _libc.mallinfo2.restype = _Counts
    numbers = _libc.mallinfo2().numbers
    return int(numbers[4] + numbers[7])


def _held() -> int:
    """Return bytes of memory that are this process's own; files that it maps are not."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def memory_in_use() -> int:
    """Return resident memory of this process and its children, in bytes."""
    total = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # it ended meanwhile
            continue
    return total
