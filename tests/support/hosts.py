"""Other trainers for tests of the adapters, which run where a trainer is installed."""

from importlib import import_module
from importlib.util import find_spec

import pytest


def host(module):
    """Import a module of another trainer; skip the tests where it is not installed.

    Where it is installed and something that it needs is not, the import fails: a job of that trainer must not pass
    without its tests.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return import_module(module)
