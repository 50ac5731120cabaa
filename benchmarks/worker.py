"""One side of a comparison in a process of its own, which does what it is asked and waits meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


class Worker:
    """The process, as the one who compares sees it."""

    def __init__(self, script: str, settings: dict[str, Any]) -> None:
        """Start `script --worker SETTINGS`."""
        command = [sys.executable, script, "--worker", json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Worker:
        """It was started already."""
        return self

    def __exit__(self, *_: object) -> None:
        """It ends with its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, question: str) -> Any:
        """What it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that was asked for {question!r} has ended; its error is above.")
        return json.loads(answer)


def held() -> int:
    """Bytes of memory that this process holds now."""
    return _status("VmRSS")


def peak(device: str = "cpu") -> int:
    """Most bytes of memory that this process has held, or that its tensors have held on a GPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}; memory is measured on Linux only")
