"""Import other trainers for tests of the adapters, if a trainer is installed."""

from importlib import import_module
from importlib.util import find_spec

import pytest


def host(module):
    """Import a module of another trainer. Skip the tests if the trainer is not installed.

    If the trainer is installed without its dependencies, the import fails. A CI job of that trainer must not pass
    without its tests.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return import_module(module)
