"""Recompute ppo-clip as its papers write it, with products of probabilities and geometric means, in 60 digits.

Gradients are differences of two values. What a paper writes as sg[...] keeps the policy of the batch meanwhile.
Shares no code with the library. Writes ppo_clip.json beside this file. Made with mpmath 1.3.0 by

    python tests/golden/make_ppo_clip.py
"""

import json
import random
from itertools import product
from pathlib import Path

import mpmath
from mpmath import mpf

mpmath.mp.dps = 60


def make_batch(generator: random.Random) -> dict:
    """Return three trajectories of 1 to 4 turns of 1 to 4 tokens."""
    batch = {"policy": [], "behavior": [], "reference": [], "weight": []}
    for _ in range(3):
        lengths = [generator.randint(1, 4) for _ in range(generator.randint(1, 4))]
        policy = [[round(-generator.uniform(0.1, 2), 4) for _ in range(n)] for n in lengths]
        for name in ("behavior", "reference"):
            batch[name].append(
                [[round(u + generator.uniform(-0.6, 0.6), 4) for u in turn] for turn in policy]
            )
        batch["policy"].append(policy)
        batch["weight"].append([round(generator.uniform(-2, 2), 4) for _ in lengths])
    return batch


def make_proximal(generator: random.Random, batch: dict) -> list:
    """Return log-probabilities near those of the behavior, nested alike."""
    return [
        [[round(u + generator.uniform(-0.9, 0.9), 4) for u in turn] for turn in turns]
        for turns in batch["behavior"]
    ]


def geometric(policy: list, other: list) -> mpf:
    """Return the geometric mean of the tokens' ratios of two policies."""
    ratio = mpmath.fprod(mpmath.exp(mpf(p)) / mpmath.exp(mpf(q)) for p, q in zip(policy, other, strict=True))
    return mpmath.root(ratio, len(policy))


def token_losses(batch: dict, k: int, settings: dict, moved: list) -> tuple[list, list]:
    """Return the clipped term and the divergence of each token of a trajectory, each `[turns][tokens]`.

    `moved` is the policy whose loss it is; where the gradient of a ratio is of each token's own, the ratio of a turn or
    a sequence is sg[ratio] pi / sg[pi], and sg is of `policy`.
    """
    importance, cap = settings.get("importance", "none"), mpf(settings.get("importance_cap", 2))
    own = settings.get("ratio_gradient", "token") == "token"
    policy, engine = moved[k], batch["behavior"][k]
    kept = batch["policy"][k] if own else policy
    behavior = engine if importance == "none" else batch["proximal"][k]
    whole = geometric([u for t in kept for u in t], [u for t in behavior for u in t])
    found, divergences = [], []
    for turn, still, sampled, drawn, reference, weight in zip(
        policy, kept, behavior, engine, batch["reference"][k], batch["weight"][k], strict=True
    ):
        losses, divergence = [], []
        for p, s, q, m, r in zip(turn, still, sampled, drawn, reference, strict=True):
            kinds = {"token": geometric([s], [q]), "turn": geometric(still, sampled), "sequence": whole}
            ratio = kinds[settings.get("ratio", "token")] * mpmath.exp(mpf(p)) / mpmath.exp(mpf(s))
            advantage = mpf(weight)
            low, high = 1 - mpf(settings.get("clip_low", 0.2)), 1 + mpf(settings.get("clip_high", 0.2))
            value = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            if "dual_clip" in settings and advantage < 0:
                value = min(value, -mpf(settings["dual_clip"]) * advantage)
            away = {"none": mpf(1), "token": geometric([q], [m]), "turn": geometric(sampled, drawn)}
            value *= min(away[importance], cap) if importance != "none" else 1
            inverse = mpmath.exp(mpf(r)) / mpmath.exp(mpf(p))
            estimates = {
                "k1": -mpmath.log(inverse),
                "k2": mpmath.log(inverse) ** 2 / 2,
                "k3": inverse - 1 - mpmath.log(inverse),
            }
            losses.append(value)
            divergence.append(mpf(settings.get("kl", 0)) * estimates[settings.get("kl_estimator", "k3")])
        found.append(losses)
        divergences.append(divergence)
    return found, divergences


def aggregated(terms: list, kind: str, counted: list) -> list:
    """Return one number for each trajectory; a mean over tokens or turns divides by those that are counted."""
    tokens = sum(len(turn) for k in counted for turn in terms[k])
    turns = sum(len(terms[k]) for k in counted)
    found = []
    for each in terms:
        total = mpmath.fsum(loss for turn in each for loss in turn)
        means = mpmath.fsum(mpmath.fsum(turn) / len(turn) for turn in each)
        by_kind = {
            "token_mean": total * len(counted) / tokens,
            "turn_mean": means * len(counted) / turns,
            "trajectory_mean": total / sum(len(turn) for turn in each),
            "token_sum": total,
        }
        found.append(by_kind[kind])
    return found


def values(batch: dict, settings: dict, has_spread: list, moved: list | None = None) -> list:
    """Return the loss of each trajectory; their mean is the aggregate."""
    terms = [token_losses(batch, k, settings, moved or batch["policy"]) for k in range(len(has_spread))]
    kind, everyone = settings.get("aggregate", "token_mean"), list(range(len(has_spread)))
    clipped = aggregated([one for one, _ in terms], kind, [k for k in everyone if has_spread[k]])
    divergence = aggregated([other for _, other in terms], kind, everyone)
    return [one + other for one, other in zip(clipped, divergence, strict=True)]


def gradient(batch: dict, settings: dict, has_spread: list) -> list:
    """Return the derivative of the sum over trajectories by the log-probability of each token, in order."""
    step, found = mpf(10) ** -20, []
    for k, turns in enumerate(batch["policy"]):
        for i, turn in enumerate(turns):
            for j in range(len(turn)):
                ends = []
                for side in (1, -1):
                    moved = [[[mpf(u) for u in t] for t in ts] for ts in batch["policy"]]
                    moved[k][i][j] += side * step
                    ends.append(mpmath.fsum(values(batch, settings, has_spread, moved)))
                found.append(float((ends[0] - ends[1]) / (2 * step)))
    return found


def make_case(batch: dict, settings: dict, has_spread: list) -> dict:
    """Return a case; the weights of a trajectory without spread are 0."""
    weight = [
        turns if spread else [0.0] * len(turns)
        for turns, spread in zip(batch["weight"], has_spread, strict=True)
    ]
    batch = batch | {"weight": weight}
    found = [float(value) for value in values(batch, settings, has_spread)]
    of_tokens = gradient(batch, settings, has_spread)
    return {"settings": settings, "has_spread": has_spread, "values": found, "gradient": of_tokens}


def main() -> None:
    """Write ppo_clip.json."""
    batch = make_batch(random.Random(7))
    batch["proximal"] = make_proximal(random.Random(8), batch)
    aggregates = ("token_mean", "turn_mean", "trajectory_mean", "token_sum")
    variants = [
        {"ratio": ratio, "aggregate": aggregate}
        for ratio, aggregate in product(("token", "turn", "sequence"), aggregates)
    ]
    variants += [{}, {"clip_low": 0.1, "clip_high": 0.3}, {"dual_clip": 1.1}]
    variants += [{"kl": 0.3, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3")]
    variants += [
        {"importance": over, "importance_cap": cap, "ratio": ratio, "kl": 0.2}
        for over, cap, ratio in product(("token", "turn"), (1.2, 2.0), ("token", "turn"))
    ]
    variants += [
        {"importance": over, "ratio": ratio, "ratio_gradient": how, "clip_low": 0.9, "clip_high": 9.0}
        for over, ratio, how in product(("none", "token"), ("turn", "sequence"), ("token", "mean"))
    ]
    variants += [
        {"ratio": "sequence", "ratio_gradient": "mean", "aggregate": aggregate, "clip_low": 0.9}
        for aggregate in aggregates
    ]
    cases = [make_case(batch, settings, [True] * 3) for settings in variants]
    cases += [
        make_case(batch, {"aggregate": aggregate, "kl": kl}, [True, False, True])
        for aggregate, kl in product(aggregates, (0.0, 0.3))
    ]
    golden = {"command": "python tests/golden/make_ppo_clip.py", **batch, "cases": cases}
    Path(__file__).with_name("ppo_clip.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
