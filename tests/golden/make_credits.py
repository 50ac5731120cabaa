"""Recompute every credit of a group as its source writes it, row by row, in exact fractions where it has no root.

Shares no code with the library: a group is a list of rows as peers have it, one per turn, and a sum is a loop
over rows. Writes credits.json beside this file. Made with Python 3.11 by

    python tests/golden/make_credits.py
"""

import json
from fractions import Fraction
from math import exp, log, sqrt
from pathlib import Path

from credit_groups import make_groups

EPS = Fraction(1, 10**6)
F = Fraction


def make_rows(group: list, gamma: Fraction) -> list:
    """Return one row per turn."""
    rows = []
    for i, one in enumerate(group):
        rewards = [F(r) for r in one["rewards"]]
        for t, state in enumerate(one["states"]):
            rows.append(
                {
                    "i": i,
                    "t": t,
                    "turns": len(rewards),
                    "state": state,
                    "last": one["states"][: t + 1],
                    "S": sum(rewards),
                    "G": sum((gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))), F(0)),
                    "collected": sum((gamma**k * rewards[k] for k in range(t)), F(0)),
                    "r": rewards[t],
                    "V": F(str(one["values"][t])),
                    "valid": one["valid"][t],
                    "success": one["success"],
                    "path": one["path"],
                    "calls": one["matches"][t],
                    "answer": one["answer"],
                    "branches": one["branches"],
                    "feedback": one["feedback"][t],
                    "c": F(str(one["contributions"][t])),
                    "critics": [[F(str(own[t])) for own in one["critics"][side]] for side in ("q", "v")],
                    "cluster": one["clusters"],
                    "likelier": [
                        F(str(own)) - F(str(its))
                        for own, its in zip(one["progress"][t], one["reference"][t], strict=True)
                    ],
                    "around": one["answers"][t : t + 2],
                }
            )
    return rows


def average(values: list) -> Fraction:
    """Return the mean."""
    return sum(values, F(0)) / len(values)


def spread(values: list, ddof: int = 1) -> Fraction:
    """Return the standard deviation."""
    centre = average(values)
    return F(sqrt(sum(((v - centre) ** 2 for v in values), F(0)) / (len(values) - ddof)))


def z(value: Fraction, values: list, std: bool, ddof: int = 1) -> Fraction:
    """Return a value against others: less their mean, over their deviation if asked for."""
    if len(values) < 2 or len(set(values)) == 1:
        return F(0)
    return (value - average(values)) / ((spread(values, ddof) + EPS) if std else 1)


def scores(rows: list) -> list:
    """Return the score of each trajectory."""
    return [row["S"] for row in rows if row["t"] == 0]


def same(rows: list, row: dict) -> list:
    """Return the rows at a row's state."""
    return [other for other in rows if row["state"] is not None and other["state"] == row["state"]]


def following(rows: list, row: dict) -> dict | None:
    """Return the row of the next turn."""
    return next((o for o in rows if o["i"] == row["i"] and o["t"] == row["t"] + 1), None)


def grpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return GRPO's advantage."""
    steps = settings.get("statistics") == "steps"
    over = [r["S"] for r in rows] if steps else scores(rows)
    return z(row["S"], over, settings.get("normalize", "std") == "std", settings.get("std") != "population")


def dr_grpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return Dr. GRPO's."""
    return grpo(rows, row, {**settings, "normalize": "mean"})


def maxrl(rows: list, row: dict, settings: dict) -> Fraction:
    """Return MaxRL's."""
    return (row["S"] - average(scores(rows))) / (average(scores(rows)) + EPS)


def rloo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return RLOO's: over the others' scores, or all rows but this one."""
    if settings.get("statistics") == "steps":
        return row["S"] - average([o["S"] for o in rows if o is not row])
    return row["S"] - average([o["S"] for o in rows if o["t"] == 0 and o["i"] != row["i"]])


def slate(rows: list, row: dict, settings: dict) -> Fraction:
    """Return SLATE's where nothing is played on: first turns, each against the others."""
    if row["t"]:
        return F(0)
    worth = {
        o["i"]: F(int(o["valid"])) if settings.get("by") == "valid" else o["r"] for o in rows if not o["t"]
    }
    if settings.get("normalize") == "std":
        return z(worth[row["i"]], list(worth.values()), True)
    return worth[row["i"]] - average([value for i, value in worth.items() if i != row["i"]])


def reinforce(rows: list, row: dict, settings: dict) -> Fraction:
    """Return REINFORCE++'s."""
    firsts = [o for o in rows if o["t"] == 0]
    off = average(scores(rows)) if settings.get("baseline") else F(0)
    key = "S" if settings.get("baseline") else "G"
    over = [o[key] - off for o in (rows if settings.get("statistics") == "steps" else firsts)]
    if len(set(over)) == 1:
        return F(0)
    return (row[key] - off - average(over)) / F(sqrt(spread(over) ** 2 + F(1, 10**8)))


def trloo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return TRLOO's, with lambda = 1."""
    gamma = F(str(settings.get("gamma", 1)))
    peers = [o["G"] for o in rows if o["t"] == row["t"] and o["i"] != row["i"]]
    if peers:
        return row["G"] - average(peers)
    others = average([o["G"] for o in rows if o["t"] == 0 and o["i"] != row["i"]])
    return row["G"] - (others - row["collected"]) / gamma ** row["t"]


def anchor_rloo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return ours, by its definition."""
    gamma = F(str(settings.get("gamma", 1)))
    peers = [o["G"] for o in same(rows, row) if o["i"] != row["i"]]
    if peers:
        return gamma ** row["t"] * (row["G"] - average(peers))
    others = average([o["G"] for o in rows if o["t"] == 0 and o["i"] != row["i"]])
    return gamma ** row["t"] * (row["G"] - (others - row["collected"]) / gamma ** row["t"])


def gigpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return GiGPO's."""
    std, penalty = settings.get("normalize") == "std", F(str(settings.get("invalid_penalty", 0)))

    def off(r: dict) -> Fraction:
        return F(0) if r["valid"] else penalty

    over = [r["S"] - off(r) for r in rows] if settings.get("statistics") == "steps" else scores(rows)
    episode = z(row["S"] - off(row), over, True) if std else row["S"] - off(row) - average(over)
    return episode + z(row["G"] - off(row), [r["G"] - off(r) for r in same(rows, row)], std)


def hgpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return HGPO's."""
    std, total, weights = settings.get("normalize") == "std", F(0), F(0)
    for k in range(1, settings.get("history", 2) + 2):
        last = row["last"][-k:]
        if len(row["last"]) < k or None in last:
            continue
        peers = [r["G"] for r in rows if len(r["last"]) >= k and r["last"][-k:] == last]
        found = z(row["G"], peers, std, 0)
        if found:
            total, weights = total + (k + 1) * found, weights + (k + 1)
    if settings.get("base_group"):
        found = z(row["S"], [r["S"] for r in rows], std)
        if found:
            total, weights = total + found, weights + 1
    return total / (weights + EPS)


def state_of(row: dict) -> object:
    """Return the node of a row: its state, or itself."""
    return row["state"] if row["state"] is not None else (row["i"], row["t"])


def graphgpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return GraphGPO's, by Bellman-Ford."""
    penalized = {}
    for r in rows:
        penalized[r["i"]] = penalized.get(r["i"], r["S"]) - (0 if r["valid"] else F(1, 10))
    episode = z(penalized[row["i"]], list(penalized.values()), True)
    edges = []
    for r in rows:
        after = following(rows, r)
        to = state_of(after) if after else ("success" if r["success"] else ("end", r["i"]))
        edges.append((r, state_of(r), "SUCCESS" if to == "success" else to))
    distance = {"SUCCESS": 0}
    for _ in edges:
        for _, node, to in edges:
            if to in distance:
                distance[node] = min(distance.get(node, 10**6), distance[to] + 1)
    if len(distance) == 1:
        return episode
    far = max(distance.values()) + 1
    value = {(r["i"], r["t"]): 10 * F(1, 10) ** distance.get(to, far) for r, _, to in edges}
    return episode + z(value[row["i"], row["t"]], [value[r["i"], r["t"]] for r in same(rows, row)], True)


def g2po(rows: list, row: dict, settings: dict) -> Fraction:
    """Return G2PO's."""
    std, gamma = settings.get("normalize") == "std", F(19, 20)

    def value(r: dict) -> Fraction:
        return average([gamma ** (o["turns"] - o["t"]) * o["S"] for o in (same(rows, r) or [r])])

    def after(r: dict) -> Fraction:
        then = following(rows, r)
        return value(then) if then else (r["S"] if r["success"] else F(0))

    def off(r: dict) -> Fraction:
        return F(0) if r["valid"] else F(1, 10)

    over = [r["S"] - off(r) for r in rows] if settings.get("statistics") == "steps" else scores(rows)
    episode = z(row["S"] - off(row), over, True) if std else row["S"] - off(row) - average(over)
    first = z(after(row) - off(row), [after(r) - off(r) for r in same(rows, row)], std)
    return episode + first + z(after(row) - value(row), [after(r) - value(r) for r in rows], std)


def pgpo(rows: list, row: dict, settings: dict) -> Fraction:
    """Return PGPO's, with gamma = 1."""
    std = settings.get("normalize", "std") == "std"

    def potential(r: dict) -> Fraction:
        return average([o["G"] for o in (same(rows, r) or [r])])

    def change(r: dict) -> Fraction:
        then = following(rows, r)
        return (potential(then) if then else r["r"]) - potential(r)

    p = average([F(r["success"]) for r in rows if r["t"] == 0])
    peers = same(rows, row)
    rise = z(change(row), [change(r) for r in peers], std)
    return z(row["G"], [r["G"] for r in peers], std) + (1 - p) ** 2 * rise


def turn_gae(rows: list, row: dict, settings: dict) -> Fraction:
    """Return the generalized advantage as a sum of temporal differences."""
    gamma, lam = (F(str(settings.get(name, 1))) for name in ("gamma", "lam"))
    total = F(0)
    for o in (r for r in rows if r["i"] == row["i"] and r["t"] >= row["t"]):
        after = following(rows, o)
        delta = o["r"] + gamma * (after["V"] if after else 0) - o["V"]
        total += (gamma * lam) ** (o["t"] - row["t"]) * delta
    return total


def v0(rows: list, row: dict, settings: dict) -> Fraction:
    """Return V0's: the score less V of the first turn, and less those of others so many times as they are."""
    start = next(o["V"] for o in rows if o["i"] == row["i"] and o["t"] == 0)
    if "prior" not in settings:
        return row["S"] - start
    others = [o["S"] for o in rows if o["t"] == 0 and o["i"] != row["i"]]
    return row["S"] - average([start] * settings["prior"] + others)


def hiper(rows: list, row: dict, settings: dict) -> Fraction:
    """Return that of a segment of one turn: turn by turn by the lambda of segments."""
    return turn_gae(rows, row, settings | {"lam": settings.get("high_level_lam", 1)})


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


CREDITS = {
    "first-error": (first_error, [{}, {"turns": "only"}, {"low": 0.5, "high": 2.0}]),
    "process-score": (process_score, [{}, {"by": "valid"}, {"by": "outcome"}]),
    "potential": (potential, [{}]),
    "grpo": (grpo, [{}, {"normalize": "mean"}, {"statistics": "steps"}, {"std": "population"}]),
    "dr-grpo": (dr_grpo, [{}, {"statistics": "steps"}]),
    "maxrl": (maxrl, [{}]),
    "rloo": (rloo, [{}, {"statistics": "steps"}]),
    "reinforce++": (reinforce, [{}, {"gamma": 0.5}, {"baseline": True}, {"statistics": "steps"}]),
    "trloo": (trloo, [{}, {"gamma": 0.5}]),
    "anchor-rloo": (anchor_rloo, [{}, {"gamma": 0.5}]),
    "gigpo": (
        gigpo,
        [
            {},
            {"gamma": 1.0, "normalize": "std"},
            {"statistics": "steps", "invalid_penalty": 0.1},
            {"normalize": "std", "invalid_penalty": 0.1},
        ],
    ),
    "hgpo": (hgpo, [{}, {"normalize": "std", "base_group": True}, {"history": 0}]),
    "graphgpo": (graphgpo, [{}]),
    "g2po": (g2po, [{}, {"statistics": "steps"}, {"normalize": "std"}]),
    "pgpo": (pgpo, [{}, {"normalize": "mean"}]),
    "matchtir": (
        matchtir,
        [
            {},
            {"lam": 0.5, "unmatched_penalty": 0.5},
            {"assignment": "soft", "singleton": "raw"},
            {"baseline": "others"},
        ],
    ),
    "igpo": (
        igpo,
        [
            {},
            {"gamma": 0.5, "normalize": "mean"},
            {"pools": "separate", "gain": "logprob"},
            {"std": "sample", "last_gain": True},
        ],
    ),
    "a2tgpo": (
        a2tgpo,
        [
            {},
            {"gamma": 0.5, "alpha": 1.0, "normalize": "mean"},
            {"gain": "logprob", "std": "sample"},
        ],
    ),
    "siop": (
        siop,
        [
            {},
            {"gamma": 0.5, "lam": 1.0, "normalize": "mean"},
            {"last_gain": False, "std": "population"},
        ],
    ),
    "infopo": (
        infopo,
        [
            {},
            {"temperature": 1.0},
            {"beta": 2.0, "temperature": 0.5, "normalize": "mean"},
            {"temperature": 2.0, "std": "population"},
        ],
    ),
    "progress-advantage": (
        progress_advantage,
        [
            {},
            {"alpha": 2.0, "normalize": "mean", "reduction": "mean"},
            {"outcome": False, "std": "population"},
        ],
    ),
    "oprl": (
        oprl,
        [
            {},
            {"step_gamma": 1.0, "alpha": 0.5},
            {"step_gamma": 0.5, "normalize": "mean"},
            {"reduction": "mean", "std": "population"},
        ],
    ),
    "spa": (spa, [{}, {"grounding": 0.5}, {"residual": False}, {"residual": False, "grounding": 0.5}]),
    "spo": (spo, [{}]),
    "pav": (pav, [{}, {"alpha": 0.25}, {"alpha": 3.0}]),
    "portool": (rloo, [{}, {"blend": 0.25, "value": "leaves"}]),
    "arpo": (grpo, [{}, {"normalize": "mean"}, {"std": "population"}]),
    "slate": (slate, [{}, {"normalize": "std"}, {"by": "valid"}]),
    "v0": (v0, [{}, {"prior": 2}]),
    "turn-gae": (turn_gae, [{}, {"gamma": 0.9, "lam": 0.8}]),
    "bi-level-gae": (turn_gae, [{}]),
    "hiper": (hiper, [{}, {"gamma": 0.9, "lam": 0.3, "high_level_lam": 0.8}]),
    "archer": (archer, [{}]),
}
"""Credit -> its formula, and the settings it is computed with."""
GAMMA = {"gigpo": F(19, 20), "hgpo": F(19, 20)}


def main() -> None:
    """Write credits.json."""
    groups, cases = make_groups(6), []
    for name, (formula, variants) in CREDITS.items():
        for settings in variants:
            gamma = F(str(settings["gamma"])) if "gamma" in settings else GAMMA.get(name, F(1))
            expected = []
            for group in groups:
                rows = make_rows(group, gamma)
                expected.append(
                    [
                        [float(formula(rows, row, settings)) for row in rows if row["i"] == i]
                        for i in range(len(group))
                    ]
                )
            cases.append({"credit": name, "settings": settings, "expected": expected})
    golden = {"command": "python tests/golden/make_credits.py", "groups": groups, "cases": cases}
    Path(__file__).with_name("credits.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
