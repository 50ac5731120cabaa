"""Official scores of answers to HotpotQA questions: exact match, and F1 over words."""

from __future__ import annotations

import re
import string
from collections import Counter

PUNCTUATION = str.maketrans("", "", string.punctuation)
"""Table for `str.translate` that deletes ASCII punctuation."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE = ("yes", "no", "noanswer")
"""Answers that get no partial credit."""


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation and articles (a, an, the), and with single spaces.

    As in the official script, Unicode is not normalized. So an accented letter as one character does not equal the same
    letter with a combining accent.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> bool:
    """Return whether an answer equals the gold answer after normalization."""
    return normalize_answer(answer) == normalize_answer(gold)


def f1_score(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over normalized words, in [0, 1].

        F1 = 2 * common / (words of the answer + words of the gold answer)

    `common` counts a word as often as both answers contain it.

    Source: Yang et al. 2018, "HotpotQA", arXiv:1809.09600, and its evaluation script.
    Differs: nothing. As in the script, yes and no get no partial credit, and two empty answers score 0.
    """
    given, wanted = normalize_answer(answer), normalize_answer(gold)
    if given != wanted and (given in _WHOLE or wanted in _WHOLE):
        return 0.0
    words, gold_words = given.split(), wanted.split()
    common = (Counter(words) & Counter(gold_words)).total()
    return 2 * common / (len(words) + len(gold_words)) if common else 0.0
