"""Format numbers, times, intervals, comparisons and protocols for the report."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perturn.data.iteration_numbers import is_number


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share in percent; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def significant(value: float | None) -> str:
    """Return a number with three significant digits, or as a whole number from 1,000; a dash for None."""
    return "–" if value is None else f"{value:.3g}" if abs(value) < 999.5 else number(value, 0)


def interval(ends: Sequence[float | None], as_percent: bool = False) -> str:
    """Return both ends of an interval as text; a question mark for None."""
    return brackets(
        "?" if end is None else f"{100 * end:.1f}" if as_percent else f"{end:.3f}" for end in ends
    )


def brackets(ends: Iterable[str]) -> str:
    """Return the two ends of an interval as `[low, high]`."""
    return f"[{', '.join(ends)}]"


def time(seconds: float | None) -> str:
    """Return a duration as text."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def short(value: str) -> str:
    """Return a hash by its first 12 digits. Any other text is returned unchanged."""
    return f"{value[:12]}…" if len(value) >= 40 and set(value) <= set(string.hexdigits) else value


def count(value: Any) -> str:
    """Return a number with separators for thousands; any other value as plain text."""
    return f"{value:,}" if is_number(value) else str(value)


def comparison_sentences(comparison: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Return the verdict and the evidence of a paired comparison as two sentences; None without a comparison."""
    if comparison is None:
        return None
    a, b, n, difference = (comparison[key] for key in ("a", "b", "n", "mean_difference"))
    if comparison["ties"] == n:
        tasks = "the only task" if n == 1 else f"all {n} tasks"
        return (
            f"{a} is not distinguishable from {b}: their scores are identical on {tasks}.",
            "There is no difference to test. More tasks help only if the policies act differently: compare their "
            "episodes side by side.",
        )
    low, high = comparison["interval"]
    record = f"{comparison['wins']} won, {comparison['losses']} lost, {comparison['ties']} tied"
    exact = comparison["mcnemar_p_value"]
    mcnemar = "" if exact is None else f"; McNemar's exact p {_p_value(exact)}"
    facts = (
        f"Task by task, {a} differs from {b} by {difference:+.3f} on average "
        f"(95\u00a0% interval {brackets(map(_signed, (low, high)))}; p {_p_value(comparison['p_value'])}{mcnemar}; "
        f"{n} {'task' if n == 1 else 'tasks'}: {record})."
    )
    return _verdict(a, b, low, high, comparison["p_value"]), facts


def _verdict(a: str, b: str, low: float | None, high: float | None, p_value: float) -> str:
    if low is not None and low > 0 and p_value < 0.05:
        return f"{a} is better than {b}."
    if high is not None and high < 0 and p_value < 0.05:
        return f"{a} is worse than {b}."
    if low is None or high is None:
        return f"Whether {a} differs from {b} is unclear: differences that are all equal give no interval."
    if low <= 0 <= high and p_value >= 0.05:
        return f"{a} is not distinguishable from {b}: the interval of the difference contains zero."
    reason = (
        "the sign-flip test rejects zero, but the interval contains it"
        if p_value < 0.05
        else "the interval leaves zero out, but the sign-flip test does not reject it"
    )
    return f"Whether {a} differs from {b} is unclear: {reason}."


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}"


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def protocol_line(stamp: Mapping[str, Any]) -> str:
    """Describe the conditions of a score. Two scores can be compared only if their conditions are equal.

    Stamps of older versions lack some conditions.

    Args:
        stamp: `evaluation/protocol.json` of a run.
    """
    where = f" on {stamp['environment']}" if stamp.get("environment") else ""
    tasks = (
        f"split {stamp['split']}" if stamp.get("split") else "",
        f"n = {stamp['n']}" if "n" in stamp else "",
        f"task list {stamp['panel_sha256'][:12]}" if stamp.get("panel_sha256") else "",
        f"{samples} episodes of each task" if (samples := stamp.get("samples") or 1) > 1 else "",
    )
    history = stamp.get("history")
    parts = [
        f"{stamp.get('name') or 'unnamed protocol'}{where}",
        ", ".join(filter(None, tasks)),
        _limits(stamp.get("max_turns")),
        *_turn_control(stamp.get("turns")),
        "" if history is None else "full history" if history == "full" else f"history of {history} turns",
        "admissible actions listed" if stamp.get("list_admissible") else "",
        _decoding(stamp.get("decoding")),
        *_request(stamp.get("request")),
        *_others(stamp),
        _selection(stamp.get("select")),
        f"seed {stamp['seed']}" if "seed" in stamp else "",
        *(
            f"departs from the protocol in {name}: {values['here']} instead of {values['protocol']}"
            for name, values in (stamp.get("departures") or {}).items()
        ),
    ]
    return "; ".join(filter(None, parts))


def _limits(limits: Mapping[str, int] | None) -> str:
    if not limits:
        return ""
    low, high = min(limits.values()), max(limits.values())
    return f"at most {high} turns" if low == high else f"at most {low} to {high} turns by kind"


def _turn_control(settings: Any) -> Iterator[str]:
    if not isinstance(settings, Mapping):
        return
    if settings.get("reminder"):
        yield "told how many turns are left"
    if settings.get("extend"):
        often, still = settings.get("times"), settings.get("progress")
        who = f"after progress within {still} turns" if still else "for all that have not ended"
        yield f"at most {often} extension{'' if often == 1 else 's'} of {settings['extend']} turns {who}"


def _others(stamp: Mapping[str, Any]) -> Iterator[str]:
    """Yield the models besides the policy that take part in the episodes, and the suffixes that ask for success."""
    for key, part in (("judge", "rewards by judge"), ("user", "user played by")):
        if isinstance(found := stamp.get(key), Mapping):
            yield f"{part} {found.get('model')}"
    if isinstance(told := stamp.get("told"), Mapping):
        yield f"told: {', '.join(dict.fromkeys(map(json.dumps, told.values())))}"


def _selection(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return ""
    where = "episodes of each task" if settings.get("among") == "episodes" else "actions at each turn"
    seen = ", which looks at the result" if settings.get("sees_outcome") else ""
    return f"the best of {settings.get('samples')} {where} by {settings.get('name')}{seen}"


def cost_lines(policies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each policy on the cost of best-of-n, of sampled actions, or of turn control.

    Args:
        policies: Rows of `summary.json`.
    """
    of_turns = [
        f"{row['name']} sampled {found['actions']} actions with {found['action_tokens']} tokens; the "
        f"{found['turns']} actions that were chosen have {found['taken_tokens']} tokens."
        for row in policies
        if (found := row.get("candidates"))
    ]
    return [*of_turns, *_taught(policies), *_controlled(policies)] + [
        f"{row['name']} played {row['drawn']['episodes']} episodes in all, with {row['drawn']['turns']} turns and "
        f"{row['drawn']['action_tokens']} tokens of actions; {100 * row['drawn']['success_rate']:.1f}\u00a0% succeeded."
        for row in policies
        if row.get("drawn")
    ]


ERRORS = {"wrong": "turns that do not bring the success nearer", "invalid": "invalid turns"}
"""Kind of error -> its name; see `perturn.analysis.turn_errors`."""


def error_lines(policies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on how often turns are errors before and after a first error, and how often a policy recovers.

    Args:
        policies: Rows of `summary.json`.
    """
    found = []
    for row in policies:
        errors = row.get("errors")
        if errors and errors["difference"]:
            before, after, difference = (errors[key] for key in ("before", "after", "difference"))
            ends = brackets("?" if end is None else f"{100 * end:+.1f}" for end in difference["interval"])
            found.append(
                f"{row['name']}, {ERRORS[errors['kind']]}: {_share(before)} of the turns up to the first such turn of "
                f"an episode, {_share(after)} of later turns; difference {100 * difference['mean']:+.1f} points {ends}."
            )
        if errors and errors["back"]:
            found.append(
                f"{row['name']} recovers in {_share(errors['back'])} of {errors['back']['n']} episodes with such a "
                "turn: a later turn gets nearer to the success than the episode was before the error."
            )
    return found


def _share(found: Mapping[str, Any]) -> str:
    return f"{100 * found['mean']:.1f}\u00a0%"


def _taught(policies: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in policies:
        if found := row.get("value_head"):
            share = found["explained"]
            said = (
                "the scores of these episodes are all equal"
                if share is None
                else f"it explains {100 * share:.0f}\u00a0% of the variance of scores in held-out episodes"
            )
            yield (
                f"The value head of {row['name']} was trained on {found['episodes']} explored episodes with "
                f"{found['tokens']} tokens; {said}."
            )


def _controlled(policies: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in policies:
        if found := row.get("turn_control"):
            n = found["episodes"]
            tokens = f" and wrote {found['action_tokens'] / n:.1f} tokens" if found["action_tokens"] else ""
            yield (
                f"{row['name']} played {found['turns'] / n:.1f} turns{tokens} per episode; {found['extended']} of {n} "
                f"episodes were extended, {found['extensions']} times in all."
            )


def _decoding(decoding: Any) -> str:
    if not isinstance(decoding, Mapping):
        return ""
    temperature = decoding.get("temperature")
    how = "greedy" if temperature == 0 else f"temperature {temperature}, top-p {decoding.get('top_p')}"
    return f"{how}, at most {decoding.get('max_new_tokens')} tokens per turn"


def _request(request: Any) -> list[str]:
    found = request if isinstance(request, Mapping) else {}
    return [f"each request with {name}={json.dumps(value)}" for name, value in found.items()]
