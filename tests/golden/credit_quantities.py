"""Formulas of credits that read a quantity of a policy, an environment or branches, as their sources write them."""

from fractions import Fraction
from math import exp, log, sqrt

from credit_outcomes import rloo, trloo
from credit_rows import EPS, F, average, following, scores, spread, z


def archer(rows: list, row: dict, settings: dict) -> Fraction:
    """Return ArCHer's: what the lower critic says behind the action less what the lower one says before it."""
    behind, before = (sorted(own) for own in row["critics"])
    return behind[0] - before[0]


def igpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return IGPO's: likelihoods around a turn, its reward among those of its pool, and the sum from there on."""
    gamma = F(str(settings.get("gamma", 1)))
    separate, std = settings.get("pools") == "separate", settings.get("normalize", "std") == "std"

    def is_last(r: dict) -> bool:
        return r["t"] == r["turns"] - 1

    def reward(r: dict) -> Fraction:
        if is_last(r) and not settings.get("last_gain"):
            return r["r"]
        before, after = r["answer"][r["t"]], r["answer"][r["t"] + 1]
        if settings.get("gain") == "logprob":
            return r["r"] + F(after) - F(before)
        return r["r"] + F(exp(after)) - F(exp(before))

    total = F(0)
    for o in (r for r in rows if r["i"] == row["i"] and r["t"] >= row["t"]):
        pool = [r for r in rows if not separate or is_last(r) == is_last(o)]
        ddof = settings.get("std") == "sample"
        total += gamma ** (o["t"] - row["t"]) * z(reward(o), [reward(r) for r in pool], std, ddof)
    return total


def a2tgpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return A2TGPO's: gains among those at their turn index, and the outcome among the outcomes."""
    gamma, alpha = F(str(settings.get("gamma", 1))), F(str(settings.get("alpha", 0.3)))
    std, ddof = settings.get("normalize", "std") == "std", settings.get("std") == "sample"

    def gain(r: dict) -> Fraction:
        before, after = r["answer"][r["t"]], r["answer"][r["t"] + 1]
        return F(after) - F(before) if settings.get("gain") == "logprob" else F(exp(after)) - F(exp(before))

    total, terms = F(0), row["turns"] - 1 - row["t"]
    for o in (r for r in rows if r["i"] == row["i"] and row["t"] <= r["t"] < r["turns"] - 1):
        peers = [gain(r) for r in rows if r["t"] == o["t"] and r["t"] < r["turns"] - 1]
        total += gamma ** (o["t"] - row["t"]) * z(gain(o), peers, std, ddof)
    return z(row["S"], scores(rows), std, ddof) + (alpha * total / F(sqrt(terms)) if terms else 0)


def siop(rows: list, row: dict, settings: dict) -> Fraction:
    """Return SIOP's: the gain of the own cluster's likelihood times its share, and the share at the end."""
    gamma, lam = F(str(settings.get("gamma", 1))), F(str(settings.get("lam", 0.5)))
    std, ddof = settings.get("normalize", "std") == "std", settings.get("std", "sample") == "sample"

    def potential(logprobs: list) -> Fraction:
        return F(log(1e-8 + sum(map(exp, logprobs)) / len(logprobs)))

    def reward(r: dict) -> Fraction:
        if r["cluster"] < 0:
            return F(0)
        answered = [o["cluster"] for o in rows if o["t"] == 0 and o["cluster"] >= 0]
        share, is_last = F(answered.count(r["cluster"]), len(answered)), r["t"] == r["turns"] - 1
        counts = not is_last or (r["turns"] > 1 and settings.get("last_gain", True))
        found = potential(r["around"][1]) - potential(r["around"][0]) if counts else F(0)
        return share * (found + (1 - lam if is_last else 0))

    every = [reward(r) for r in rows]
    own = [r for r in rows if r["i"] == row["i"] and r["t"] >= row["t"]]
    return sum(gamma ** (o["t"] - row["t"]) * z(reward(o), every, std, ddof) for o in own)


def spo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return what is expected at the end of the turn's segment, and earned on it, less what is at its beginning."""
    own = [r for r in rows if r["i"] == row["i"]]
    others = [r["S"] for r in rows if r["t"] == 0 and r["i"] != row["i"]]

    def begins(r: dict) -> bool:
        return r["t"] == 0 or r["branches"][r["t"]] is not None

    def expected(r: dict) -> Fraction:
        return average(others) if r["t"] == 0 else F(r["branches"][r["t"]])

    first = [r for r in own if r["t"] <= row["t"] and begins(r)][-1]
    later = [r for r in own if r["t"] > row["t"] and begins(r)]
    end, after = (later[0]["t"], expected(later[0])) if later else (row["turns"], F(0))
    return sum(r["r"] for r in own if first["t"] <= r["t"] < end) + after - expected(first)


def spa(rows: list, row: dict, settings: dict) -> Fraction:
    """Return the sum of rewards from there on, the last of which takes the rest, less the mean of the others'."""
    bonus, residual = F(str(settings.get("grounding", 0))), settings.get("residual", True)

    def paid(r: dict) -> Fraction:
        rest = r["S"] - sum(o["c"] for o in rows if o["i"] == r["i"])
        return r["c"] + bonus * r["valid"] + (rest if residual and not following(rows, r) else 0)

    def ahead(i: int) -> Fraction:
        return sum((paid(o) for o in rows if o["i"] == i and o["t"] >= row["t"]), F(0))

    others = [o["i"] for o in rows if o["i"] != row["i"] and o["t"] == row["t"]]
    return ahead(row["i"]) - (average([ahead(i) for i in others]) if others else 0)


def pav(rows: list, row: dict, settings: dict) -> Fraction:
    """Return RLOO's, and alpha times the change of what the prover expects over the turn's segment.

    Before the first turn it expects what the others had by the ends of their first segments, or else in the end.
    """

    def ahead(r: dict) -> dict | None:
        own = (o for o in rows if o["i"] == r["i"] and o["t"] > r["t"] and o["branches"][o["t"]] is not None)
        return next(own, None)

    def reached(r: dict) -> Fraction:
        then = ahead(r)
        end = then["t"] if then else r["turns"]
        paid = sum(o["r"] for o in rows if o["i"] == r["i"] and r["t"] <= o["t"] < end)
        return paid + (F(then["branches"][end]) if then else 0)

    own = [r for r in rows if r["i"] == row["i"] and r["t"] <= row["t"]]
    begun = [r for r in own if r["t"] == 0 or r["branches"][r["t"]] is not None][-1]
    before = F(begun["branches"][begun["t"]] or 0)
    if begun["t"] == 0:
        before = average([reached(r) for r in rows if r["t"] == 0 and r["i"] != row["i"]])
    alpha = F(str(settings.get("alpha", 1)))
    return rloo(rows, row, {}) + alpha * (reached(begun) - before)


def infopo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return GRPO's, and the gain of the reply among those known, through a gate on the deviation of S."""
    std, ddof = settings.get("normalize", "std") == "std", settings.get("std", "sample") == "sample"
    gap = spread(scores(rows), ddof) / F(str(settings.get("temperature", 0.05)))
    found = z(row["S"], scores(rows), std, ddof)
    if row["feedback"] is not None:
        known = [F(r["feedback"]) for r in rows if r["feedback"] is not None]
        share = F(exp(-gap)) / (1 + F(exp(-gap)))
        found += F(str(settings.get("beta", 0.5))) * share * z(F(row["feedback"]), known, std, ddof)
    return found


def implicit(rows: list, row: dict, settings: dict) -> Fraction:
    """Return how much likelier a turn became, against all turns of the group."""

    def own(r: dict) -> Fraction:
        return average(r["likelier"]) if settings.get("reduction") == "mean" else sum(r["likelier"], F(0))

    std, ddof = settings.get("normalize", "std") == "std", settings.get("std", "sample") == "sample"
    return z(own(row), [own(r) for r in rows], std, ddof)


def progress_advantage(rows: list, row: dict, settings: dict) -> Fraction:
    """Return RLOO's, unless it is left out, and a share of how much likelier the turn became."""
    outcome = rloo(rows, row, {}) if settings.get("outcome", True) else F(0)
    return outcome + F(str(settings.get("alpha", 0.1))) * implicit(rows, row, settings)


def oprl(rows: list, row: dict, settings: dict) -> Fraction:
    """Return GRPO's, and the discounted implicit rewards of the turn and of later ones."""
    std, ddof = settings.get("normalize", "std") == "std", settings.get("std", "sample") == "sample"
    gamma, found = F(str(settings.get("step_gamma", 0))), z(row["S"], scores(rows), std, ddof)
    for other in rows:
        if other["i"] == row["i"] and other["t"] >= row["t"]:
            weight = gamma ** (other["t"] - row["t"])
            found += F(str(settings.get("alpha", 1))) * weight * implicit(rows, other, settings)
    return found


def first_error(rows: list, row: dict, settings: dict) -> float:
    """The weight of a turn, from the lengths of the way: 99 stands for none."""
    path = [99 if length is None else length for length in row["path"]]
    errors = [t for t in range(row["turns"]) if path[t + 1] > path[t] - 1]
    counts = row["t"] in errors if settings.get("turns") == "only" else any(t <= row["t"] for t in errors)
    return settings.get("high", 1.0) if counts or not errors else settings.get("low", 0.2)


def process_score(rows: list, row: dict, settings: dict) -> float:
    """Return 1 for a turn after which the way is shorter (99 stands for none), or that was valid; or the score."""
    path = [99 if length is None else length for length in row["path"]]
    by = settings.get("by", "progress")
    nearer = path[row["t"] + 1] <= path[row["t"]] - 1
    return row["S"] if by == "outcome" else float(row["valid"] if by == "valid" else nearer)


def potential(rows: list, row: dict, settings: dict) -> Fraction:
    """Return the turns that a turn took off the way, less the mean over all turns of the others; None is no way."""

    def gain(r: dict) -> int:
        before, after = r["path"][r["t"]], r["path"][r["t"] + 1]
        if before is None:
            return 0
        return before - after if after is not None else -1

    others = [F(gain(r)) for r in rows if r["i"] != row["i"]]
    return gain(row) - average(others) if others else F(0)


def matched(rows: list, settings: dict) -> list:
    """Return the rows with MatchTIR's rewards, and the sums of them."""
    lam, lost = F(str(settings.get("lam", 0.9))), F(str(settings.get("unmatched_penalty", 0)))
    paid = []
    for row in rows:
        calls = [F(call) if call else -lost for call in row["calls"]]
        paid.append({**row, "r": row["r"] + (average(calls) if calls else 0)})
    found = []
    for row in paid:
        own = [o for o in paid if o["i"] == row["i"]]
        sums = {
            "S": sum(o["r"] for o in own),
            "G": sum(lam ** (o["t"] - row["t"]) * o["r"] for o in own if o["t"] >= row["t"]),
            "collected": sum(lam ** o["t"] * o["r"] for o in own if o["t"] < row["t"]),
        }
        found.append({**row, **sums})
    return found


def matchtir(rows: list, row: dict, settings: dict) -> Fraction:
    """Return MatchTIR's: half of the trajectory's, half of the turn's at its index."""
    paid = matched(rows, settings)
    row = paid[rows.index(row)]
    if settings.get("baseline") == "others":
        return (rloo(paid, row, {}) + trloo(paid, row, {"gamma": settings.get("lam", 0.9)})) / 2
    peers = [o["G"] for o in paid if o["t"] == row["t"]]
    turn = z(row["G"], peers, True)
    if len(peers) == 1 and settings.get("singleton") == "raw":
        turn = row["G"] / (1 + EPS)
    return (z(row["S"], scores(paid), True) + turn) / 2
