"""Formulas of credits that read rewards, outcomes, states and values, each as its source writes it."""

from fractions import Fraction
from math import sqrt

from credit_rows import EPS, F, average, following, same, scores, spread, z


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
    peers = [o["G"] for o in rows if o["t"] == row["t"] and o["i"] != row["i"]]
    if peers:
        return row["G"] - average(peers)
    others = average([o["G"] for o in rows if o["t"] == 0 and o["i"] != row["i"]])
    return row["G"] - (others - row["collected"])


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
        return r["r"] + (potential(then) if then else 0) - potential(r)

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
