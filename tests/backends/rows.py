"""Rows of each kind, for losses of each kind."""

from dataclasses import replace

from perturn.remaining import Remaining
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn, WeightedTrajectory

WORDS = ["north", "south", "east", "west", "up", "down", "lamp", "door", "key", "box"]


def trajectory(*said, task="t/0", observed="room"):
    """An episode in which so much is said."""
    turns = [
        Turn(
            ({"role": "user", "content": f"{observed} {i}"},),
            Action(text),
            remaining=Remaining(3 - i, 2 - i + i % 2),
        )
        for i, text in enumerate(said)
    ]
    return Trajectory(Task(task), tuple(turns), prompt=({"role": "system", "content": "Play."},))


def pairs(n=6):
    """Pairs of different length: 1 to 3 turns, actions of 1 to 4 words."""
    return [
        PreferencePair(
            trajectory(*[" ".join(WORDS[i : i + 1 + (i + k) % 4]) for k in range(1 + i % 3)], task=f"t/{i}"),
            trajectory(*[" ".join(WORDS[i + 1 : i + 2 + k % 3]) for k in range(1 + (i + 1) % 3)]),
        )
        for i in range(n)
    ]


def labelled():
    """Episodes with a label each, after different prompts."""
    return [
        WeightedTrajectory(replace(one, task=Task(f"t/{n}")), (1.0 if n % 3 else -1.0,) * len(one.turns))
        for n, one in enumerate(
            trajectory(*(" ".join(WORDS[n : n + 2]) for _ in range(1 + n % 2)), observed=f"{WORDS[n]} room")
            for n in range(6)
        )
    ]


def sampled(renderer):
    """Episodes whose actions have token ids and log-probabilities, with a weight per turn."""
    found = []
    for n in range(6):
        one = trajectory(*(" ".join(WORDS[n + k : n + k + 2]) for k in range(1 + n % 3)), task=f"t/{n // 3}")
        turns = []
        for turn in one.turns:
            ids = [*renderer.tokenizer.encode(turn.action.text), min(renderer.end_ids)]
            logprobs = [-5.0 - 0.1 * (token % 7) for token in ids]
            action = replace(renderer.action(ids, logprobs), text=turn.action.text)
            turns.append(replace(turn, action=action))
        weights = tuple(0.5 - (n + k) % 2 for k in range(len(turns)))
        found.append(WeightedTrajectory(replace(one, turns=tuple(turns)), weights))
    return found


def rows_of(loss, renderer):
    """Rows of the kind that a loss learns from."""
    kind = loss.traits.rows
    if kind == "groups":
        return sampled(renderer)
    if kind == "labelled":
        return labelled()
    return pairs() if kind == "pairs" else [pair.chosen for pair in pairs()]
