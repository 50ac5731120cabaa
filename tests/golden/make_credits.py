"""Recompute every credit of a group as its source writes it, row by row, in exact fractions where it has no root.

Shares no code with the library: a group is a list of rows as peers have it, one a turn, and a sum is a loop over rows.
Writes credits.json beside this file. Made with Python 3.11 by

    python tests/golden/make_credits.py
"""

import json
from pathlib import Path

from credit_groups import make_groups
from credit_outcomes import (
    anchor_rloo,
    dr_grpo,
    g2po,
    gigpo,
    graphgpo,
    grpo,
    hgpo,
    hiper,
    maxrl,
    pgpo,
    reinforce,
    rloo,
    slate,
    trloo,
    turn_gae,
    v0,
)
from credit_quantities import (
    a2tgpo,
    archer,
    first_error,
    igpo,
    infopo,
    matchtir,
    oprl,
    pav,
    potential,
    process_score,
    progress_advantage,
    siop,
    spa,
    spo,
)
from credit_rows import F, make_rows

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
