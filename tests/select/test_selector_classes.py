"""Selector classes of the user's that do not keep what their traits declare."""

import pytest

from perturn.errors import ConfigError
from perturn.select.lookup import make_selector

CODE = """
from perturn.select import SelectorTraits


class NoMethod:
    traits = SelectorTraits(among=("episodes",))


class UnknownNeed:
    traits = SelectorTraits(among=("episodes",), needs=frozenset({"logprob"}))

    def among_episodes(self, inputs):
        return lambda episodes: [0.0] * len(episodes)


class Raises(UnknownNeed):
    traits = SelectorTraits(among=("episodes",))

    def __init__(self):
        raise RuntimeError("no luck")
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NoMethod", "must have 'among_episodes', and has none"),
        ("UnknownNeed", "needs logprob, which nothing gives"),
        (
            "Raises",
            r"evaluate.select: guests.*\.Raises cannot be made: RuntimeError: no luck\. Correct",
        ),
    ],
)
def test_a_class_that_lacks_what_it_declares_is_rejected(tmp_path, name, says):
    """When it is made, which is before any work."""
    file = tmp_path / "guests.py"
    file.write_text(CODE)

    with pytest.raises(ConfigError, match=says):
        make_selector({"name": f"{file}:{name}"})


def test_a_key_that_a_selector_lacks_is_told_the_keys_of_the_section():
    with pytest.raises(
        ConfigError, match=r"'evaluate.select.foo'\. Known: evaluate.select.among, evaluate.select.samp"
    ):
        make_selector({"name": "likelihood", "among": "episodes", "samples": 2, "foo": 1})
