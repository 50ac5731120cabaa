"""Settings of the section `pair` that go unread, or lack what they need, beside its other settings."""

from __future__ import annotations

from perturn.settings.sections import Pair, require

_CHOSEN_BY_SIGNALS = ("expert", "group", "correction")
"""`pair.within` where an explored episode is in one pair at most, and may be left out."""


def check_pair(pair: Pair) -> None:
    """Refuse what would go unread, and corrections without what they need."""
    require(
        pair.within in ("group", "branch") or pair.per_group == Pair.per_group,
        f"pair.per_group is read with pair.within=group or branch alone, not with {pair.within}; leave it "
        "out.",
    )
    require(
        pair.within in ("expert", "step", "correction") or pair.max_extra_turns is None,
        "pair.max_extra_turns is read with pair.within=expert, step or correction alone, not with "
        f"{pair.within}; leave it out.",
    )
    require(
        not pair.signals or (pair.file is None and pair.within in _CHOSEN_BY_SIGNALS),
        f"pair.signals are read with pair.within={' or '.join(_CHOSEN_BY_SIGNALS)} alone, and not of a file; leave "
        "them out.",
    )
    _check_turns(pair)
    if pair.within != "correction":
        return
    require(
        pair.file is None,
        "pair.file holds pairs, so pair.within=correction makes none; leave one out.",
    )
    require(
        pair.remaining is not None,
        "pair.remaining must be shortest or searching with pair.within=correction, which begins at the first wrong "
        "turn; set it.",
    )


def _check_turns(pair: Pair) -> None:
    """Refuse what would go unread of pairs that are told apart by their turns, or end with one."""
    require(
        pair.length == "episode" or pair.within in ("branch", "correction"),
        f"pair.length=turn is read with pair.within=branch or correction alone, not with {pair.within}; leave it "
        "out.",
    )
    require(
        pair.length == "episode" or pair.max_extra_turns is None,
        "pair.max_extra_turns cuts nothing with pair.length=turn, where both sides end together; leave it out.",
    )
    require(
        pair.by == "outcome" or pair.within == "branch",
        f"pair.by is read with pair.within=branch alone, not with {pair.within}; leave it out.",
    )
    require(
        pair.within not in ("branch", "step", "tree") or pair.file is None,
        f"pair.file holds pairs, so pair.within={pair.within} makes none; leave one out.",
    )
    require(
        pair.by != "progress" or pair.remaining is not None,
        "pair.remaining must be shortest or searching with pair.by=progress, which reads whether a turn brings the "
        "success nearer; set it.",
    )
    require(
        pair.by != "progress" or pair.threshold == Pair.threshold,
        "pair.threshold is a gap between scores, and pair.by=progress reads none; leave it out.",
    )
    require(
        pair.by != "drop" or pair.per_group == Pair.per_group,
        "pair.per_group is not read with pair.by=drop, where a step is in one pair at most; leave it out.",
    )
