"""Recompute the entropy of some distributions, and its gradient in the logits, in 60-digit arithmetic.

The gradient is a difference of two values. Shares no code with the library. Writes token_entropy.json beside this file.
Made with mpmath 1.3.0 by

    python tests/golden/make_token_entropy.py
"""

import json
import random
from pathlib import Path

import mpmath
from mpmath import mpf

mpmath.mp.dps = 60
STEP = mpf(10) ** -20


def entropy(logits: list) -> mpf:
    """Return -sum p log p in nats, with p the probabilities that are proportional to the exponentials."""
    shares = [mpmath.exp(each) for each in logits]
    total = mpmath.fsum(shares)
    return -mpmath.fsum(share / total * mpmath.log(share / total) for share in shares)


def slope(logits: list, k: int) -> mpf:
    """Return the derivative in one logit, by a central difference."""
    up, down = ([z + (sign * STEP if i == k else 0) for i, z in enumerate(logits)] for sign in (1, -1))
    return (entropy(up) - entropy(down)) / (2 * STEP)


def main() -> None:
    """Write the cases: flat, usual, and nearly certain distributions."""
    generator = random.Random(0)
    cases = []
    for spread in (0.0, 1.0, 4.0, 30.0):
        drawn = [round(generator.uniform(-spread, spread), 4) for _ in range(7)]
        logits = [mpf(each) for each in drawn]
        found = {"entropy": float(entropy(logits)), "gradient": [float(slope(logits, k)) for k in range(7)]}
        cases.append({"logits": drawn, **found})
    file = Path(__file__).parent / "token_entropy.json"
    file.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
