"""Alarms for runs that go wrong. Each rule has a sentence and a check of plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

EPISODES = 20
"""Number of episodes that are compared at each end of a series."""
ITERATIONS = 3
"""Number of iterations that are compared at each end of a run."""
_REMEDY = "explore harder or easier tasks, or take a higher temperature."
STEPS = 10
"""Number of last optimizer steps that a rule reads."""


@dataclass(frozen=True)
class Vitals:
    """Numbers that the rules read."""

    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Score of each evaluated episode, by policy, in the order of training."""
    surprise: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Mean negative log-probability of the sampled tokens of each episode, in nats per token, by file. At sampling
    temperature 1 it estimates the policy's entropy."""
    metrics: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    """Training metrics of each stage, one row for each step."""
    groups: Sequence[Sequence[float]] = ()
    """Scores of the samples of each task that was explored more than once."""
    without_spread: tuple[int, int] | None = None
    """(number of groups whose newest credit is 0 at every turn, number of all groups); None if no credit uses groups.
    """
    success: Sequence[float] = ()
    """Success rate of the explored episodes of each iteration."""
    failed: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    """Whether each episode failed, by file."""
    max_log_ratio: float = 20.0
    """Absolute value at which the loss clamps log-ratios, in nats."""


@dataclass(frozen=True)
class Rule:
    """Rule of one alarm."""

    name: str
    says: str
    """Description of when the alarm is raised."""
    check: Callable[[Vitals], Iterator[str]]
    """Yield a sentence for each fault; nothing if all is well."""


def _success(vitals: Vitals) -> Iterator[str]:
    best_name, best = "", 0.0
    for name, scores in vitals.scores.items():
        if len(scores) < EPISODES:
            continue
        mean = fmean(scores)
        if best >= 0.05 and mean < best / 2:
            yield f"{name} scores {mean:.3f} on {len(scores)} episodes, {best_name} scored {best:.3f}."
        if mean > best:
            best_name, best = name, mean


def _falling(vitals: Vitals) -> Iterator[str]:
    if len(vitals.success) < 2 * ITERATIONS:
        return
    began, last = fmean(vitals.success[:ITERATIONS]), vitals.success[-ITERATIONS:]
    if began >= 0.05 and max(last) < began / 2:
        yield (
            f"the last {ITERATIONS} iterations explored with at most {max(last):.0%} success, the first {ITERATIONS} "
            f"with {began:.0%}; lower the learning rate, or hold to the reference (align.loss.kl)."
        )


def _entropy(vitals: Vitals) -> Iterator[str]:
    for name, values in vitals.surprise.items():
        if len(values) >= EPISODES and fmean(values[-EPISODES:]) < 0.02:
            yield f"{name}: {fmean(values[-EPISODES:]):.3f} nats a token; samples of a task will be nearly equal."
        elif len(values) >= 2 * EPISODES and fmean(values[-EPISODES:]) < fmean(values[:EPISODES]) / 5:
            yield f"{name}: from {fmean(values[:EPISODES]):.3f} to {fmean(values[-EPISODES:]):.3f} nats a token."


def _log_ratio(vitals: Vitals) -> Iterator[str]:
    for stage in vitals.metrics:
        for side in ("chosen", "rejected"):
            found = _series(vitals, stage, f"log_ratio/{side}")[-STEPS:]
            if found and abs(fmean(found)) > vitals.max_log_ratio / 2:
                yield (
                    f"{stage}: log_ratio/{side} is {fmean(found):+.1f} nats, the clamp {vitals.max_log_ratio:g}; "
                    "lower the learning rate."
                )


def _clamped(vitals: Vitals) -> Iterator[str]:
    for stage, share in _shares_above(vitals, "clamped", 0.05):
        yield (
            f"{stage}: {share:.0%} of the pairs are clamped and teach nothing on that side; lower the learning rate, "
            "or take reduction token_mean."
        )


def _clipped(vitals: Vitals) -> Iterator[str]:
    for stage, share in _shares_above(vitals, "clip_share", 0.5):
        yield (
            f"{stage}: the clip takes the gradient of {share:.0%} of the tokens; take fewer steps per iteration "
            "(align.minibatches, align.epochs), or a lower learning rate."
        )


def _shares_above(vitals: Vitals, key: str, most: float) -> Iterator[tuple[str, float]]:
    """Yield the stages whose mean share over their last steps is above a limit, with that share."""
    for stage in vitals.metrics:
        found = _series(vitals, stage, key)[-STEPS:]
        if found and fmean(found) > most:
            yield stage, fmean(found)


def _equal_groups(vitals: Vitals) -> Iterator[str]:
    if vitals.without_spread is not None:
        zero, of = vitals.without_spread
        if of >= 10 and zero / of > 0.5:
            yield f"in {zero} of {of} groups the credit is 0 at every turn; {_REMEDY}"
        return
    groups = [group for group in vitals.groups if len(group) > 1]
    equal = sum(max(group) - min(group) <= 1e-9 for group in groups)
    if len(groups) >= 10 and equal / len(groups) > 0.5:
        yield f"{equal} of {len(groups)} tasks had samples of one score, which teach nothing; {_REMEDY}"


def _failed(vitals: Vitals) -> Iterator[str]:
    for name, values in vitals.failed.items():
        recent = values[-5 * EPISODES :]
        if (len(recent) >= 10 and fmean(recent) > 0.1) or (len(recent) > 1 and all(recent)):
            yield f"{name}: {sum(recent)} of the last {len(recent)} episodes failed; their records say why."


def _series(vitals: Vitals, stage: str, name: str) -> list[float]:
    return [row[name] for row in vitals.metrics[stage] if isinstance(row.get(name), int | float)]


RULES = (
    Rule(
        "success collapsed",
        f"A policy's mean score is less than half of an earlier policy's (each of {EPISODES} episodes or more, the "
        "earlier at least 0.05).",
        _success,
    ),
    Rule(
        "success is falling",
        f"Each of the last {ITERATIONS} iterations explored with less than half of the success of the first "
        f"{ITERATIONS} (of {2 * ITERATIONS} iterations or more, the first at 5 % at least).",
        _falling,
    ),
    Rule(
        "entropy collapsed",
        f"Sampled tokens of the last {EPISODES} explored episodes have less than 0.02 nats, or less than a fifth of "
        f"the first {EPISODES}'s, which with several iterations are the first iteration's.",
        _entropy,
    ),
    Rule(
        "log-ratios ran away",
        f"The mean log-ratio of a side, over the last {STEPS} steps, is beyond half of the loss's `max_log_ratio`.",
        _log_ratio,
    ),
    Rule(
        "pairs are clamped",
        f"More than 5 % of the pairs of the last {STEPS} steps have a log-ratio beyond `max_log_ratio`.",
        _clamped,
    ),
    Rule(
        "tokens are clipped",
        f"Over the last {STEPS} steps of a training, the clip took the gradient of more than half of the tokens.",
        _clipped,
    ),
    Rule(
        "groups are all equal",
        "Of the tasks explored twice or more (10 at least), more than half have samples of one score. Where a credit "
        "weighs groups: it is 0 at every turn of more than half of the tasks.",
        _equal_groups,
    ),
    Rule(
        "episodes fail",
        f"More than a tenth of the last {5 * EPISODES} episodes of a file (10 at least) are FAILED, or all of fewer.",
        _failed,
    ),
)


@dataclass(frozen=True)
class Alarm:
    """An alarm that is raised."""

    rule: str
    message: str


def alarms(vitals: Vitals) -> list[Alarm]:
    """Return all alarms that are raised."""
    return [Alarm(rule.name, message) for rule in RULES for message in rule.check(vitals)]
