"""How the page writes numbers, times, intervals and comparisons."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from perturn.report.figures import is_number


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent."""
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def interval(ends: Sequence[float | None], as_percent: bool = False) -> str:
    """Both ends of an interval; one that the data cannot give is a question mark."""
    return " to ".join(
        "?" if end is None else f"{100 * end:.1f}" if as_percent else f"{end:.3f}" for end in ends
    )


def time(seconds: float | None) -> str:
    """A duration."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def short(value: str) -> str:
    """A hash by its first digits; the whole of it stands elsewhere."""
    return f"{value[:12]}…" if len(value) >= 40 and set(value) <= set(string.hexdigits) else value


def count(value: Any) -> str:
    """A count with its thousands apart."""
    return f"{value:,}" if is_number(value) else str(value)


def comparison_sentences(comparison: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """A paired comparison in words: the verdict and its evidence; None if there is none."""
    if comparison is None:
        return None
    a, b, n, difference = (comparison[key] for key in ("a", "b", "n", "mean_difference"))
    low, high = comparison["interval"]
    record = f"{comparison['wins']} won, {comparison['losses']} lost, {comparison['ties']} tied"
    exact = comparison["mcnemar_p_value"]
    mcnemar = "" if exact is None else f"; McNemar's exact p {_p_value(exact)}"
    facts = (
        f"Task by task, {a} differs from {b} by {difference:+.3f} on average "
        f"(95\u00a0% interval {_signed(low)} to {_signed(high)}; p {_p_value(comparison['p_value'])}{mcnemar}; "
        f"{n} {'task' if n == 1 else 'tasks'}: {record})."
    )
    return _verdict(a, b, low, high, comparison["p_value"]), facts


def _verdict(a: str, b: str, low: float | None, high: float | None, p_value: float) -> str:
    if low is not None and low > 0 and p_value < 0.05:
        return f"{a} is better than {b}."
    if high is not None and high < 0 and p_value < 0.05:
        return f"{a} is worse than {b}."
    if low is None or high is None or low <= 0 <= high:
        return f"{a} is not distinguishable from {b}: the interval of the difference contains zero."
    return (
        f"Whether {a} differs from {b} is unclear: the interval leaves zero out, the sign-flip test does not."
    )


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}"


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
