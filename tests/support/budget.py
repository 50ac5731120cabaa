"""Pytest plugin that limits a test of the fast tier to three seconds of CPU time.

The budget counts the CPU time of this process and its child processes, so that it hardly depends on other work on the
machine. It leaves out work that several tests share: first imports, recordings (`support.recorded`), and fixtures of a
module or of the session. On a busy machine, spinning threads and cold caches still increase CPU time. So a test over
its budget is run again, and fails if it exceeds the budget both times. Tests marked `slow` and tests in tests/lints
have no budget.
"""

import contextlib
import importlib._bootstrap as bootstrap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

_TICKS = os.sysconf("SC_CLK_TCK")
_REFERENCE = 0.02
"""CPU seconds of the work of `slowness` on the reference machine for budgets."""
_TIMES = slice(
    11, 15
)  # of the fields after a process's name in /proc/PID/stat: its own times, and its ended children's


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting for pyproject.toml."""
    parser.addini(
        "cpu_seconds", "CPU seconds that a test without the mark `slow` may use; 0: any", default="0"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests of this session if they have a budget."""
    if limit := float(config.getini("cpu_seconds")):
        config.pluginmanager.register(_Meter(limit), "cpu-meter")


def cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants, including processes that have ended.

    Without Linux's /proc, a descendant is counted once it has ended.
    """
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + sum(map(_used, _descendants()))


def _used(process: int) -> float:
    """Return the CPU seconds of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[_TIMES])) / _TICKS


def _descendants() -> Iterator[int]:
    """Yield the ids of the descendants of this process."""
    left = [os.getpid()]
    while left:
        process = left.pop()
        with contextlib.suppress(OSError):  # it has ended, or this system has no such files
            for thread in os.listdir(f"/proc/{process}/task"):
                found = [
                    int(child)
                    for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split()
                ]
                left += found
                yield from found


class _Charge:
    """CPU time that is charged to tests, without shared work."""

    def __init__(self) -> None:
        self._shared = 0.0
        self._depth = 0

    def seconds(self) -> float:
        """Return the CPU seconds charged so far."""
        return cpu_seconds() - self._shared

    @contextlib.contextmanager
    def uncharged(self) -> Iterator[None]:
        """Charge the work inside the block to no test. Nested blocks are counted once."""
        begun, self._depth = (0.0 if self._depth else self.seconds()), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._shared += self.seconds() - begun


_charge = _Charge()
uncharged = _charge.uncharged


def slowness() -> float:
    """Return how much slower this machine is than the reference machine; at least 1."""

    def once() -> float:
        begun = time.process_time()
        sum(number * number % 7 for number in range(300_000))
        return time.process_time() - begun

    return max(1.0, min(once() for _ in range(3)) / _REFERENCE)


class _Meter:
    """Meter that fails tests over their budget."""

    def __init__(self, limit: float) -> None:
        self._limit = limit * slowness()
        self._begun = self._clock = 0.0
        self._over = self._again = False
        self._find_and_load = bootstrap._find_and_load  # type: ignore[attr-defined]
        bootstrap._find_and_load = self._import  # type: ignore[attr-defined]

    def _import(self, name: str, *more: Any) -> Any:
        """Import a module. A first import is charged to no test."""
        if name in sys.modules:  # `import_module` calls this each time, and measuring would be slower
            return self._find_and_load(name, *more)
        with uncharged():
            return self._find_and_load(name, *more)

    def pytest_unconfigure(self) -> None:
        """Restore the import function."""
        bootstrap._find_and_load = self._find_and_load  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Any:
        """Charge a fixture to no test if other tests share it."""
        with contextlib.nullcontext() if fixturedef.scope == "function" else uncharged():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test, and run it again if it exceeded its budget."""
        self._over = self._again = False
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if self._over:
            self._again = True
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Any:
        """Start to measure a test."""
        self._begun, self._clock = _charge.seconds(), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Run a test, and check its budget."""
        result = yield
        self._check(item)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Any:
        """Clean up after a test, and check its budget."""
        over = self._used() > self._limit  # the test has failed for that already
        result = yield
        if not over:
            self._check(item)
        return result

    def _used(self) -> float:
        """Return the CPU seconds of the current test, or an upper bound that is within the limit.

        A test can use at most all CPUs for its whole duration. This upper bound is enough for most tests, which are
        short. It also limits the seconds of an ended process, whose children may have worked before the test.
        """
        most = (time.monotonic() - self._clock) * (os.cpu_count() or 1)
        return most if most <= self._limit else min(_charge.seconds() - self._begun, most)

    def _check(self, item: pytest.Item) -> None:
        """Record that a test exceeded its budget. The second time, fail the test."""
        free = item.get_closest_marker("slow") is not None or item.path.parent.name == "lints"
        if free or (used := self._used()) <= self._limit:
            return
        self._over = True
        if self._again:
            pytest.fail(
                f"The test used {used:.1f} CPU seconds, in a second try too; a test of the fast tier may use "
                f"{self._limit:g}. Make it faster, share what it makes (tests/support/recorded.py), or mark it slow "
                "for `make test-all`.",
                pytrace=False,
            )
