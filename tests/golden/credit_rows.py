"""Rows of a group, one a turn, as peers have them, and the statistics that formulas of credits take over them."""

from fractions import Fraction
from math import sqrt

EPS = Fraction(1, 10**6)
F = Fraction


def make_rows(group: list, gamma: Fraction) -> list:
    """Return one row a turn."""
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
