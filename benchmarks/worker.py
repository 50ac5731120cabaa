"""Run one side of a comparison in its own process, which answers requests and waits between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


class Worker:
    """Handle of the process."""

    def __init__(self, script: str, settings: dict[str, Any]) -> None:
        """Start `script --worker SETTINGS`."""
        command = [sys.executable, script, "--worker", json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Worker:
        """Return the worker, which is already started."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the input of the process, which ends it, and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, question: str) -> Any:
        """Send a request, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that was asked for {question!r} has ended; its error is above.")
        return json.loads(answer)


def held() -> int:
    """Return the current memory of this process, in bytes."""
    return _status("VmRSS")


def peak(device: str = "cpu") -> int:
    """Return the peak memory of this process, or of its tensors on a GPU, in bytes."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}; memory is measured on Linux only")
