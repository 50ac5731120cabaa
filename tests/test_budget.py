"""The plugin that keeps the fast tier fast: what it charges a test for, and what it does not."""

import re

import pytest

from support import budget

SPIN = """
import subprocess, sys, time
import pytest

def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

IN_A_CHILD = "import time\\nwhile time.process_time() < 0.6: pass\\nprint(flush=True)"
"""


@pytest.fixture
def run(pytester):
    """Run the tests of a module with a budget of 0.3 seconds; the numbers of those that passed, failed, ..."""
    pytester.makeini("[pytest]\ncpu_seconds = 0.3\nmarkers = slow")

    def run(source):
        pytester.makepyfile(SPIN + source)
        found = pytester.runpytest_inprocess("-p", "no:cacheprovider", plugins=[budget])
        return found.parseoutcomes(), found.stdout.str()

    return run


def test_a_test_over_its_budget_fails_and_says_what_to_do(run):
    outcomes, printed = run("def test_long(): spin(0.6)\ndef test_short(): spin(0.05)\n")

    assert outcomes == {"failed": 1, "passed": 1}
    assert re.search(
        r"in a second try too; a test of the fast tier may use 0\.\d+\. Make it faster",
        printed,
    ), printed


def test_a_test_is_over_its_budget_when_it_is_so_twice(run):
    """What a busy machine adds once fails nothing; both runs have fixtures of their own."""
    source = (
        "TRIES = []\n"
        "@pytest.fixture\ndef made(): TRIES.append(1)\n"
        "def test_noisy(made): spin(0.05 if len(TRIES) == 2 else 0.6)\n"
        "def test_after(): assert len(TRIES) == 2\n"
    )

    assert run(source)[0] == {"passed": 2}


def test_processes_that_a_test_starts_are_charged(run):
    """Whether they have ended or not."""
    source = (
        "def test_ended(): subprocess.run([sys.executable, '-c', IN_A_CHILD])\n"
        "LEFT = []\n"
        "def test_left():\n"
        "    LEFT.append(subprocess.Popen([sys.executable, '-c', IN_A_CHILD + '\\ninput()'], stdin=-1, stdout=-1))\n"
        "    LEFT[-1].stdout.readline()\n"
        "def test_ends(): [left.communicate() for left in LEFT]\n"
    )

    _, printed = run(source)

    assert re.findall(r"^_+ (test_\w+) _+$", printed, re.MULTILINE) == ["test_ended", "test_left"]


def test_a_fixture_of_one_test_is_charged(run):
    """A fixture of a module or of the session is not: others use it too."""
    source = "@pytest.fixture(scope='{}')\ndef made(): spin(0.6)\ndef test_long(made): pass\n"
    found = [run(source.format(scope))[0] for scope in ("function", "module", "session")]

    assert found == [{"failed": 1}, {"passed": 1}, {"passed": 1}]


def test_what_several_tests_share_is_not_charged(run, pytester):
    """First imports, also by name, and what is recorded; blocks inside blocks are counted once."""
    for module in ("heavy", "heavier"):
        pytester.makepyfile(**{module: SPIN + "spin(0.6)"})
    source = (
        "def test_import(): import heavy\n"
        "def test_by_name(): import importlib; importlib.import_module('heavier')\n"
        "from support.budget import uncharged\n"
        "def test_recorded():\n    with uncharged(), uncharged(): spin(0.6)\n"
        "def test_after(): spin(0.05)\n"
        "def test_counted_once():\n    with uncharged():\n        with uncharged(): spin(0.4)\n    spin(0.6)\n"
    )

    assert run(source)[0] == {"passed": 4, "failed": 1}


def test_slow_tests_have_no_budget(run):
    assert run("@pytest.mark.slow\ndef test_long(): spin(0.6)\n")[0] == {"passed": 1}


def test_a_test_that_fails_by_itself_says_why(run):
    """Its own words, and not that of its budget."""
    _, printed = run("def test_long():\n    spin(0.6)\n    assert 'its own words' == ''\n")

    assert "its own words" in printed
