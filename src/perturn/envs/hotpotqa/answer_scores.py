"""The official scores of an answer to a HotpotQA question: exact match and F1 over words."""

from __future__ import annotations

import re
import string
from collections import Counter

PUNCTUATION = str.maketrans("", "", string.punctuation)
"""Table of the signs that a text is without once normalized, for `str.translate`."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE = ("yes", "no", "noanswer")
"""Answers that are right or wrong as a whole."""


def normalize_answer(text: str) -> str:
    """Return lower case, without ASCII punctuation, without the articles a, an and the, and with single blanks.

    As in the official script, nothing else: a letter and its accent as two characters are not the letter that has both.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> bool:
    """Return whether the two are the same once normalized."""
    return normalize_answer(answer) == normalize_answer(gold)


def f1_score(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over normalized words, each counted as often as it occurs.

        F1 = 2 * common / (words of the answer + words of the gold answer)

    Source: Yang et al. 2018, "HotpotQA", arXiv:1809.09600, and its evaluation script.
    Differs: nothing. As there, yes and no have no partial credit, and two empty answers score 0.
    """
    given, wanted = normalize_answer(answer), normalize_answer(gold)
    if given != wanted and (given in _WHOLE or wanted in _WHOLE):
        return 0.0
    words, gold_words = given.split(), wanted.split()
    common = (Counter(words) & Counter(gold_words)).total()
    return 2 * common / (len(words) + len(gold_words)) if common else 0.0
