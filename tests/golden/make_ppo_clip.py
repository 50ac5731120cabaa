"""Recompute ppo-clip as its papers write it, with products of probabilities and geometric means, in 60 digits.

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


def token_losses(batch: dict, k: int, settings: dict) -> list:
    """Return the loss of each token of a trajectory `[turns][tokens]`."""
    importance, cap = settings.get("importance", "none"), mpf(settings.get("importance_cap", 2))
    policy, engine = batch["policy"][k], batch["behavior"][k]
    behavior = engine if importance == "none" else batch["proximal"][k]
    whole = geometric([u for t in policy for u in t], [u for t in behavior for u in t])
    found = []
    for turn, sampled, drawn, reference, weight in zip(
        policy, behavior, engine, batch["reference"][k], batch["weight"][k], strict=True
    ):
        losses = []
        for p, q, m, r in zip(turn, sampled, drawn, reference, strict=True):
            kinds = {"token": geometric([p], [q]), "turn": geometric(turn, sampled), "sequence": whole}
            ratio, advantage = kinds[settings.get("ratio", "token")], mpf(weight)
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
            losses.append(value + mpf(settings.get("kl", 0)) * estimates[settings.get("kl_estimator", "k3")])
        found.append(losses)
    return found


def values(batch: dict, settings: dict) -> list:
    """Return the loss of each trajectory; their mean is the aggregate."""
    losses = [token_losses(batch, k, settings) for k in range(len(batch["policy"]))]
    tokens = sum(len(turn) for turns in losses for turn in turns)
    turns = sum(len(each) for each in losses)
    count, kind = len(losses), settings.get("aggregate", "token_mean")
    found = []
    for each in losses:
        total = mpmath.fsum(loss for turn in each for loss in turn)
        means = mpmath.fsum(mpmath.fsum(turn) / len(turn) for turn in each)
        by_kind = {
            "token_mean": total * count / tokens,
            "turn_mean": means * count / turns,
            "trajectory_mean": total / sum(len(turn) for turn in each),
            "token_sum": total,
        }
        found.append(float(by_kind[kind]))
    return found


def main() -> None:
    """Write ppo_clip.json."""
    batch = make_batch(random.Random(7))
    batch["proximal"] = make_proximal(random.Random(8), batch)
    variants = [
        {"ratio": ratio, "aggregate": aggregate}
        for ratio, aggregate in product(
            ("token", "turn", "sequence"), ("token_mean", "turn_mean", "trajectory_mean", "token_sum")
        )
    ]
    variants += [{}, {"clip_low": 0.1, "clip_high": 0.3}, {"dual_clip": 1.1}]
    variants += [{"kl": 0.3, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3")]
    variants += [
        {"importance": over, "importance_cap": cap, "ratio": ratio, "kl": 0.2}
        for over, cap, ratio in product(("token", "turn"), (1.2, 2.0), ("token", "turn"))
    ]
    cases = [{"settings": settings, "values": values(batch, settings)} for settings in variants]
    golden = {"command": "python tests/golden/make_ppo_clip.py", **batch, "cases": cases}
    Path(__file__).with_name("ppo_clip.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
