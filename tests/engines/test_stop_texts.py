"""Sampled tokens that go on after a stop text."""

import pytest

from perturn.engines.stop_texts import until


class Letters:
    """Tokens of one letter each."""

    def text_of(self, ids):
        """The letters."""
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ((), "say it. End. more"),
        (("End.",), "say it. End."),
        (("End.", "it"), "say it"),
        (("no",), "say it. End. more"),
    ],
)
def test_an_answer_ends_with_the_first_stop_text(stop, kept):
    """The text that ends it is a part of it."""
    assert until(Letters(), stop, [*map(ord, "say it. End. more")]) == [*map(ord, kept)]
