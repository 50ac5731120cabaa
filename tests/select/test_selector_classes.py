"""Selector classes of the user's that do not keep what their traits declare."""

import pytest

from perturn.errors import ConfigError
from perturn.select.lookup import make_selector
from perturn.select.protocol import SelectorTraits
from support.guests import added

CODE = """
from perturn.select import SelectorTraits


class NoMethod:
    traits = SelectorTraits(among=("episodes",))


class OneWord:
    traits = SelectorTraits(among="episodes")


class UnknownNeed:
    traits = SelectorTraits(among=("episodes",), needs=frozenset({"logprob"}))

    def among_episodes(self, inputs):
        return lambda episodes: [0.0] * len(episodes)


class Misspelt(UnknownNeed):
    traits = SelectorTraits(among=("episodes",))

    def among_action(self, inputs):
        return lambda task, prompt, actions: [0.0] * len(actions)


class Raises(UnknownNeed):
    traits = SelectorTraits(among=("episodes",))

    def __init__(self):
        raise RuntimeError("no luck")
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NoMethod", "must have 'among_episodes', and has none"),
        ("OneWord", r"among in the traits of '.*' must be a tuple with words of .*, got 'episodes'"),
        ("UnknownNeed", "needs logprob, which nothing gives"),
        (
            "Misspelt",
            "selector Misspelt has 'among_action', which is never read. Did you mean `among_actions`?",
        ),
        (
            "Raises",
            r"evaluate.select: guests.*\.Raises cannot be made: RuntimeError: no luck .*\. Correct",
        ),
    ],
)
def test_a_class_that_lacks_what_it_declares_is_rejected(tmp_path, name, says):
    """When it is made, which is before any work."""
    file = tmp_path / "guests.py"
    file.write_text(CODE)

    with pytest.raises(ConfigError, match=says):
        make_selector({"name": f"{file}:{name}"})


class Bare:
    """A selector of a package without traits."""


class Half:
    """A selector of a package that lacks one of its methods."""

    traits = SelectorTraits()

    def among_episodes(self, inputs):
        """Return nothing, which no test does."""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Bare, "selector Bare must have 'traits', and has none; see perturn.select.Selector."),
        (Half, "selector Half must have 'among_actions', and has none"),
    ],
)
def test_a_selector_of_a_package_is_checked_too(kind, says):
    with added("perturn.selectors", own=kind), pytest.raises(ConfigError, match=says):
        make_selector({"name": "own", "among": "episodes", "samples": 2})


def test_a_key_that_a_selector_lacks_is_told_the_keys_of_the_section():
    with pytest.raises(
        ConfigError, match=r"'evaluate.select.foo'\. Known: evaluate.select.among, evaluate.select.samp"
    ):
        make_selector({"name": "likelihood", "among": "episodes", "samples": 2, "foo": 1})
