"""HotpotQA's scores, worked by hand."""

import pytest

from perturn.envs.hotpotqa.answer_scores import exact_match, f1_score, normalize_answer


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Beatles", "beatles"),
        ("An apple, a  pear.", "apple pear"),
        ("U.S.", "us"),
        ("rock-and-roll", "rockandroll"),
        ("theatre", "theatre"),
        ("A", ""),
        ("1,000", "1000"),
        ("Café “Noir”", "café “noir”"),
        ("Cafe\u0301", "cafe\u0301"),
    ],
)
def test_normal_form(text, normalized):
    """Case, ASCII punctuation, articles as whole words, and blanks go; curly quotes and lone accents stay."""
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("Wend", "the Wend", True, 1.0),
        ("river Wend", "the Wend", False, 2 / 3),  # common 1 of 2 given and 1 wanted: 2 * 1 / (2 + 1)
        ("New York City", "New York", False, 0.8),  # 2 * 2 / (3 + 2)
        ("New New York", "New York", False, 0.8),  # a word counts as often as both have it
        ("York New", "New York", False, 1.0),  # order is not looked at
        ("Boston", "New York", False, 0.0),
        ("yes", "yes", True, 1.0),
        ("yes, it is", "yes", False, 0.0),  # nothing in part for yes and no
        ("no", "no answer", False, 0.0),
        ("noanswer", "answer", False, 0.0),
        ("", "Wend", False, 0.0),
        ("the", "a", True, 0.0),  # nothing is left of either
    ],
)
def test_scores(answer, gold, exact, f1):
    """Each as the comment works it out; the two are symmetric."""
    assert exact_match(answer, gold) is exact
    assert f1_score(answer, gold) == pytest.approx(f1)
    assert f1_score(gold, answer) == pytest.approx(f1)
