"""Give memory that is free back to the system: glibc keeps what was freed, and torch's allocator on a GPU does too."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path

import torch

_GROWTH = 2**30
"""Bytes by which a process may grow before it is looked through for free memory."""


def release_memory() -> None:
    """Free what models that are gone have left, so that the next stage does not add to it.

    Keys and values of a thousand conversations leave 2 GB of small free blocks, which glibc keeps until asked.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _trim()


class Growth:
    """Keeps a long stretch of work from holding ever more memory on the CPU.

    Activations of ever other sizes fragment the memory that glibc keeps: training that has 4 GB in use held 6 GB after
    some steps. Returning each large block at once costs half as much again as the training itself, since the system
    clears the pages anew. So what one pass leaves is kept for the next, and all that is free is returned when the
    process has grown by a gigabyte beyond that.
    """

    def __init__(self) -> None:
        """No pass was made yet."""
        self._usual = 0

    def bound(self) -> None:
        """After a pass: return free memory if the process has grown by a gigabyte beyond what is usual."""
        now = _resident()
        if not self._usual:
            self._usual = now
        elif now > self._usual + _GROWTH:
            _trim()
            self._usual = 0


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where /proc does not tell."""
    counts = Path("/proc/self/statm")
    return int(counts.read_text().split()[1]) * mmap.PAGESIZE if counts.exists() else 0
