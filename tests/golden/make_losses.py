"""Recompute every loss as its paper writes it, with products of probabilities, in 60-digit arithmetic.

Shares no code with the library: no torch, no log space, and f' by numerical differentiation of f.
Writes losses.json beside this file. Made with mpmath 1.3.0 by

    python tests/golden/make_losses.py
"""

import json
import random
from itertools import product
from pathlib import Path

import mpmath
from mpmath import mpf

mpmath.mp.dps = 60

KERNELS = {  # tlm-DRE, Appendix A, Eqs. 18, 20, 22, 24
    "lsif": lambda r, alpha: (r - 1) ** 2 / 2,
    "ukl": lambda r, alpha: r * mpmath.log(r) - r,
    "bce": lambda r, alpha: r * mpmath.log(r) - (r + 1) * mpmath.log(r + 1),
    "basu": lambda r, alpha: (r ** (1 + alpha) - r) / alpha,
}


SCORES = {
    "chosen": [[1, 0.75], [0, 0.5, 0.25], [1, 1]],
    "rejected": [[1, 0, 0, 0, 1], [1, 0.5], [0, 0.25, 0, 1]],
}
"""A number for each turn of the two sides, which a credit may have written."""


def make_side(generator: random.Random) -> dict:
    """Return three trajectories of 1 to 5 turns of 1 to 6 tokens; every other turn is a confident one."""
    policy, reference = [], []
    for _ in range(3):
        policy.append([])
        reference.append([])
        for turn in range(generator.randint(1, 5)):
            tokens = generator.randint(1, 6)
            scale = 0.06 if turn % 2 == 0 else 1.0
            of_reference = [round(-scale * generator.uniform(0.1, 1.5), 4) for _ in range(tokens)]
            reference[-1].append(of_reference)
            policy[-1].append([round(u + generator.uniform(-0.4, 0.5), 4) for u in of_reference])
    return {"policy": policy, "reference": reference}


def probability(turn: list) -> mpf:
    """Return the probability of a turn: the product over its tokens."""
    return mpmath.fprod(mpmath.exp(mpf(u)) for u in turn)


def weight(reference_turn: list, settings: dict) -> mpf:
    """Return omega, Eqs. 9-10."""
    confidence = mpmath.root(probability(reference_turn), len(reference_turn))
    return mpf(
        settings.get("low", 0.2) if confidence > settings.get("pivot", 0.9) else settings.get("high", 1.0)
    )


def powers(trajectory: list, reduction: str) -> list:
    """Return the power that the reduction raises each turn's probability to, before omega."""
    if reduction == "sum":
        return [mpf(1) for _ in trajectory]
    if reduction == "token_mean":
        return [1 / mpf(sum(len(turn) for turn in trajectory)) for _ in trajectory]
    return [1 / mpf(len(turn)) / len(trajectory) for turn in trajectory]


def ratio(policy: list, reference: list, weights: list, reduction: str) -> mpf:
    """Return r, Eq. 8."""
    parts = zip(policy, reference, weights, powers(policy, reduction), strict=True)
    return mpmath.fprod((probability(p) / probability(q)) ** (w * power) for p, q, w, power in parts)


def coefficient(reference: list, weights: list, reduction: str) -> mpf:
    """Return C_w, Eq. 16: 1 / prod pi_ref^(omega - 1)."""
    parts = zip(reference, weights, powers(reference, reduction), strict=True)
    return 1 / mpmath.fprod(probability(q) ** ((w - 1) * power) for q, w, power in parts)


def divergence_losses(chosen: dict, rejected: dict, settings: dict, weigh: bool) -> list:
    """Return Eq. 16 for each pair."""
    reduction, alpha = settings.get("reduction", "token_mean"), mpf(settings.get("alpha", 0.5))

    def f(r: mpf) -> mpf:
        return KERNELS[settings.get("kernel", "ukl")](r, alpha)

    def weights(reference: list) -> list:
        return [weight(turn, settings) if weigh else mpf(1) for turn in reference]

    coefficients = [coefficient(q, weights(q), reduction) for q in chosen["reference"]]
    kind = settings.get("coefficient", "reference")
    if kind == "one":
        coefficients = [mpf(1) for _ in coefficients]
    if kind == "self_normalized":
        coefficients = [len(coefficients) * c / mpmath.fsum(coefficients) for c in coefficients]
    losses = []
    for k, c in enumerate(coefficients):
        r_w, r_l = (
            ratio(side["policy"][k], side["reference"][k], weights(side["reference"][k]), reduction)
            for side in (chosen, rejected)
        )
        losses.append(mpmath.diff(f, r_l) * r_l - f(r_l) - c * mpmath.diff(f, r_w))
    return losses


def logistic_losses(chosen: dict, rejected: dict, beta: float, reward) -> list:
    """Return -log sigmoid of the margin between two rewards for each pair."""
    margins = [
        mpf(beta)
        * (
            reward(chosen["policy"][k], chosen["reference"][k])
            - reward(rejected["policy"][k], rejected["reference"][k])
        )
        for k in range(len(chosen["policy"]))
    ]
    return [-mpmath.log(1 / (1 + mpmath.exp(-margin))) for margin in margins]


def sft_losses(chosen: dict, rejected: dict, settings: dict) -> list:
    """Return the negative logarithm of the geometric mean of the token probabilities."""
    return [
        -mpmath.log(mpmath.root(mpmath.fprod(probability(t) for t in turns), sum(len(t) for t in turns)))
        for turns in chosen["policy"]
    ]


def dpo_losses(chosen: dict, rejected: dict, settings: dict) -> list:
    """Return DPO's Eq. 7, and `sft` times the negative logarithm of the chosen side's probability."""
    reduction = settings.get("reduction", "sum")
    losses = logistic_losses(
        chosen,
        rejected,
        settings.get("beta", 0.1),
        lambda p, q: mpmath.log(ratio(p, q, [mpf(1)] * len(p), reduction)),
    )
    likelihoods = [
        mpmath.fprod(probability(t) ** power for t, power in zip(p, powers(p, reduction), strict=True))
        for p in chosen["policy"]
    ]
    times = mpf(settings.get("sft", 0.0))
    return [loss - times * mpmath.log(each) for loss, each in zip(losses, likelihoods, strict=True)]


def tlm_dpo_losses(chosen: dict, rejected: dict, settings: dict) -> list:
    """Return DPO's Eq. 7 on the ratio of tlm-DRE's Eq. 8."""
    return logistic_losses(
        chosen,
        rejected,
        settings.get("beta", 0.1),
        lambda p, q: mpmath.log(ratio(p, q, [weight(turn, settings) for turn in q], "sum")),
    )


def w_dpo_losses(chosen: dict, rejected: dict, settings: dict) -> list:
    """Return DPO's Eq. 7, each pair times its base and the gap between the means of SCORES, or 0."""
    gaps = [
        mpf(settings.get("base", 1.0)) + mpmath.fsum(ours) / len(ours) - mpmath.fsum(theirs) / len(theirs)
        for ours, theirs in zip(SCORES["chosen"], SCORES["rejected"], strict=True)
    ]
    return [
        gap * loss if gap > 0 else mpf(0)
        for gap, loss in zip(gaps, dpo_losses(chosen, rejected, settings), strict=True)
    ]


def occupancy_reward(policy: list, reference: list, gamma: float) -> mpf:
    """Return DMPO's Eqs. 14-15: discounted log-ratios of occupancies, themselves products over turns."""
    g, occupancy, total = mpf(gamma), mpf(1), mpf(0)
    for t, (p, q) in enumerate(zip(policy, reference, strict=True)):
        occupancy *= probability(p) / probability(q)
        total += g**t * mpmath.log(occupancy)
    return (1 - g) / (1 - g ** len(policy)) * total


def printed_reward(policy: list, reference: list, gamma: float) -> mpf:
    """Return DMPO's Eq. 16 as printed."""
    g, turns = mpf(gamma), len(policy)
    return mpmath.fsum(
        (1 - g ** (turns - t)) / (1 - g**turns) * mpmath.log(probability(p) / probability(q))
        for t, (p, q) in enumerate(zip(policy, reference, strict=True))
    )


def dmpo_losses(chosen: dict, rejected: dict, settings: dict) -> list:
    """Return DMPO's loss."""
    reward = printed_reward if settings.get("discount") == "printed" else occupancy_reward
    return logistic_losses(
        chosen, rejected, settings.get("beta", 0.1), lambda p, q: reward(p, q, settings.get("gamma", 0.7))
    )


def kto_losses(chosen: dict, rejected: dict, settings: dict) -> list:
    """Return KTO's Eq. 8: the first side's trajectories are desirable, not, desirable; z0 is of the second side."""
    beta = mpf(settings.get("beta", 0.1))

    def log_ratios(side: dict) -> list:
        parts = zip(side["policy"], side["reference"], strict=True)
        return [mpmath.log(ratio(p, q, [mpf(1)] * len(p), "sum")) for p, q in parts]

    mismatched = log_ratios(rejected)
    z0 = max(mpf(0), mpmath.fsum(mismatched) / len(mismatched))
    losses = []
    for k, u in enumerate(log_ratios(chosen)):
        desirable = k % 2 == 0
        most = mpf(settings.get("desirable_weight" if desirable else "undesirable_weight", 1.0))
        value = most / (1 + mpmath.exp(-beta * (u - z0 if desirable else z0 - u)))
        losses.append(most - value)
    return losses


LOSSES = {
    "sft": sft_losses,
    "dpo": dpo_losses,
    "dmpo": dmpo_losses,
    "tlm-dpo": tlm_dpo_losses,
    "dil": lambda *arguments: divergence_losses(*arguments, weigh=False),
    "tlm-dre": lambda *arguments: divergence_losses(*arguments, weigh=True),
    "kto": kto_losses,
    "w-dpo": w_dpo_losses,
}


def all_settings() -> list:
    """Return the (loss, settings) of every case."""
    reductions = ("sum", "token_mean", "turn_mean")
    cases = [("sft", {})]
    cases += [("dpo", {"beta": 0.3, "reduction": reduction}) for reduction in reductions]
    cases += [("dpo", {"beta": 0.3, "reduction": reduction, "sft": 0.7}) for reduction in reductions]
    cases += [
        ("dmpo", {"gamma": g, "discount": d}) for g, d in product((0.2, 0.7, 0.999), ("derived", "printed"))
    ]
    cases += [("tlm-dpo", {}), ("tlm-dpo", {"beta": 1.0, "pivot": 0.5, "low": 0.4, "high": 1.5})]
    for kernel, reduction in product(KERNELS, reductions):
        cases += [("dil", {"kernel": kernel, "reduction": reduction})]
        cases += [
            ("tlm-dre", {"kernel": kernel, "reduction": reduction, "coefficient": c})
            for c in ("reference", "self_normalized", "one")
        ]
    cases += [("dil", {"kernel": "basu", "alpha": 1.3}), ("tlm-dre", {"kernel": "basu", "alpha": 0.1})]
    cases += [("tlm-dre", {"pivot": 0.5, "low": 0.4, "high": 1.5, "reduction": "sum"})]
    cases += [("kto", {}), ("kto", {"beta": 0.5, "desirable_weight": 0.4, "undesirable_weight": 1.5})]
    cases += [("w-dpo", {}), ("w-dpo", {"beta": 0.3, "base": 0.0})]
    return cases


def main() -> None:
    """Write losses.json."""
    generator = random.Random(20)
    chosen, rejected = make_side(generator), make_side(generator)
    cases = [
        {
            "loss": name,
            "settings": settings,
            "values": [float(v) for v in LOSSES[name](chosen, rejected, settings)],
        }
        | ({"weight": SCORES} if name == "w-dpo" else {})
        for name, settings in all_settings()
    ]
    golden = {
        "command": "python tests/golden/make_losses.py",
        "chosen": chosen,
        "rejected": rejected,
        "cases": cases,
    }
    Path(__file__).with_name("losses.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
