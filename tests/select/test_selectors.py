"""The table of selectors: what each entry says of itself."""

import subprocess
import sys

import pytest

from perturn.select import SELECTORS


@pytest.mark.parametrize("name", SELECTORS)
def test_an_entry_has_the_methods_that_its_traits_name(name):
    """And no other."""
    kind = SELECTORS[name]

    own = {each.removeprefix("among_") for each in vars(kind) if each.startswith("among_")}

    assert own == set(kind.traits.among)


def test_entries_are_loaded_without_torch():
    code = "import sys; from perturn.select import SELECTORS; list(SELECTORS.values()); print('torch' in sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "False"
