"""Groups of made-up trajectories, with all that a credit may read of them; `make_credits.py` weighs them."""

import random


def make_groups(count: int) -> list:
    """Return groups; what was added later is drawn for itself, so that older draws stay as they were."""
    generator = random.Random(15)
    groups = [make_group(generator) for _ in range(count)]
    add_ways(groups)
    add_matches(groups)
    add_answers(groups)
    add_branches(groups)
    add_feedback(groups)
    add_contributions(groups)
    add_own_answers(groups)
    add_critics(groups)
    add_logprobs(groups)
    return groups


def make_group(generator: random.Random) -> list:
    """Return three to five trajectories over a few states: [states], [rewards], [valid], success."""
    group = []
    for _ in range(generator.randint(3, 5)):
        turns = generator.randint(1, 5)
        rewards = [generator.choice([0, 0, 0, 0.25]) for _ in range(turns)]
        success = generator.random() < 0.5
        rewards[-1] = 1.0 if success else 0.0
        group.append(
            {
                "states": [generator.choice(["a", "b", "c", None]) for _ in range(turns)],
                "rewards": rewards,
                "valid": [generator.random() < 0.8 for _ in range(turns)],
                "success": success,
                "values": [round(generator.uniform(-1, 1), 3) for _ in range(turns)],
            }
        )
    return group


def add_ways(groups: list) -> None:
    """Give each turn the way before and after it; null is no way any more."""
    generator = random.Random(16)
    for one in (one for group in groups for one in group):
        path = [generator.randint(2, 6)]
        for _ in one["states"]:
            lost = path[-1] is None or generator.random() < 0.05
            path.append(None if lost else max(0, path[-1] + generator.choice([-2, -1, -1, -1, 0, 1])))
        one["path"] = path


def add_matches(groups: list) -> None:
    """Give each turn how well its calls match; 0 is no match, and a turn may have no call."""
    generator = random.Random(27)
    for one in (one for group in groups for one in group):
        one["matches"] = [
            [generator.choice([0.0, 0.5, 0.75, 1.0]) for _ in range(generator.choice([0, 1, 1, 2, 3]))]
            for _ in one["states"]
        ]


def add_answers(groups: list) -> None:
    """Give each trajectory the log-probability of the gold answer before each turn and after the last."""
    generator = random.Random(17)
    for one in (one for group in groups for one in group):
        one["answer"] = [round(generator.uniform(-3, 0), 3) for _ in range(len(one["states"]) + 1)]


def add_own_answers(groups: list) -> None:
    """Give each trajectory a cluster, -1: no answer, and the log-probabilities of up to three answers around turns."""
    generator = random.Random(31)
    for one in (one for group in groups for one in group):
        one["clusters"] = generator.choice([-1, 0, 0, 0, 1, 1, 2])
        count = generator.randint(1, 3) if one["clusters"] >= 0 else 0
        one["answers"] = [
            [round(generator.uniform(-3, 0), 3) for _ in range(count)] for _ in range(len(one["states"]) + 1)
        ]


def add_branches(groups: list) -> None:
    """Give each turn what episodes played on from before it earned in the mean; null: none was."""
    generator = random.Random(28)
    for one in (one for group in groups for one in group):
        one["branches"] = [generator.choice([None, 0.0, 0.25, 0.5, 1.0]) for _ in one["states"]]


def add_critics(groups: list) -> None:
    """Give each turn Q and V by two critics."""
    generator = random.Random(33)
    for one in (one for group in groups for one in group):
        one["critics"] = {
            side: [[round(generator.uniform(-1, 1), 3) for _ in one["states"]] for _ in range(2)]
            for side in ("q", "v")
        }


def add_feedback(groups: list) -> None:
    """Give each turn how much likelier the reply to it made the next one; null: nothing did, or no turn is next."""
    generator = random.Random(29)
    for one in (one for group in groups for one in group):
        gains = [generator.choice([None, *[round(generator.uniform(-1, 2), 3)] * 4]) for _ in one["states"]]
        one["feedback"] = [*gains[:-1], None]


def add_logprobs(groups: list) -> None:
    """Give the tokens of each turn log-probabilities under a policy that was trained, and under its reference."""
    generator = random.Random(32)
    for one in (one for group in groups for one in group):
        tokens = [generator.randint(1, 4) for _ in one["states"]]
        for name in ("progress", "reference"):
            one[name] = [[round(generator.uniform(-4, 0), 3) for _ in range(n)] for n in tokens]


def add_contributions(groups: list) -> None:
    """Give each turn what it contributed to the score."""
    generator = random.Random(30)
    for one in (one for group in groups for one in group):
        one["contributions"] = [round(generator.uniform(-0.5, 0.75), 3) for _ in one["states"]]
