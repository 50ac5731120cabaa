"""Plugin of pytest: a test of the fast tier may use three seconds of CPU time.

The budget counts the CPU time of this process and of the processes it started, so that a busy machine fails no test.
It leaves out what several tests share: first imports, recordings (`support.recorded`), and fixtures of a module or of
the session. CPU time grows on a busy machine too, where threads spin and caches are cold, so a test over its budget is
run again and fails if it is over it both times. Tests marked `slow` and those of tests/lints have no budget.
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
"""CPU seconds of the work of `slowness` on the machine that budgets are set on."""
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
    """Return the CPU time that this process and its descendants have used, including those that ended.

    Where there is no /proc as Linux has it, a descendant counts when it has ended.
    """
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + sum(map(_used, _descendants()))


def _used(process: int) -> float:
    """CPU seconds of a process, and of its children that ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[_TIMES])) / _TICKS


def _descendants() -> Iterator[int]:
    """Numbers of the processes below this one."""
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
    """CPU time that tests are charged for: all of it but what they share."""

    def __init__(self) -> None:
        self._shared = 0.0
        self._depth = 0

    def seconds(self) -> float:
        """Return the CPU seconds that count so far."""
        return cpu_seconds() - self._shared

    @contextlib.contextmanager
    def uncharged(self) -> Iterator[None]:
        """Charge no test for what is done inside; a block inside another is counted once."""
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
    """Return how many times longer some work takes here than on the machine that budgets are set on; at least 1."""

    def once() -> float:
        begun = time.process_time()
        sum(number * number % 7 for number in range(300_000))
        return time.process_time() - begun

    return max(1.0, min(once() for _ in range(3)) / _REFERENCE)


class _Meter:
    """Measures each test, and fails the tests that use more than their budget."""

    def __init__(self, limit: float) -> None:
        self._limit = limit * slowness()
        self._begun = self._clock = 0.0
        self._over = self._again = False
        self._find_and_load = bootstrap._find_and_load  # type: ignore[attr-defined]
        bootstrap._find_and_load = self._import  # type: ignore[attr-defined]

    def _import(self, name: str, *more: Any) -> Any:
        """Import a module, which is charged to no test if it is for the first time."""
        if name in sys.modules:  # `import_module` asks each time; to measure takes longer
            return self._find_and_load(name, *more)
        with uncharged():
            return self._find_and_load(name, *more)

    def pytest_unconfigure(self) -> None:
        """Import without measuring again."""
        bootstrap._find_and_load = self._find_and_load  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Any:
        """Charge no test for a fixture that other tests use too."""
        with contextlib.nullcontext() if fixturedef.scope == "function" else uncharged():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test, and once more if it was over its budget."""
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
        """Run a test that may not exceed its budget."""
        result = yield
        self._check(item)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Any:
        """Clean up after a test, which may not exceed its budget."""
        over = self._used() > self._limit  # it has failed for that already
        result = yield
        if not over:
            self._check(item)
        return result

    def _used(self) -> float:
        """CPU seconds of the test under way, or more where they are surely within the limit.

        A test has at most all CPUs for as long as it lasts. Most are too short to need a look at their processes; and a
        process that ended brings the seconds of its children before the test too.
        """
        most = (time.monotonic() - self._clock) * (os.cpu_count() or 1)
        return most if most <= self._limit else min(_charge.seconds() - self._begun, most)

    def _check(self, item: pytest.Item) -> None:
        """Note that a test is over its budget; the second time, fail it."""
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
