"""Episodes and features for tests of values."""

import torch

from perturn.types import Action, Task, Trajectory, Turn


def episode(*texts, history=None, task="t"):
    """Return a trajectory whose actions have these texts."""
    turns = tuple(
        Turn(({"role": "user", "content": f"Door {number}."},), Action(text))
        for number, text in enumerate(texts)
    )
    return Trajectory(Task(task), turns, history=history)


EPISODES = [
    episode("north", "open the door with the key", "wait"),
    episode("south"),
    episode("north", "wait", "look around", "north"),
    episode("north", "open the door", history=0),
    episode("wait", "wait a while", "north", history=1),
]


def drawn(episodes, features, seed=0):
    """Return random features of episodes with one to five turns. Scales differ widely, and one feature is constant."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.linspace(-2, 2, features)
    found = []
    for number in range(episodes):
        rows = torch.randn(1 + number % 5, features, generator=generator) * scale + 3
        rows[:, 0] = 7.0
        found.append(rows)
    return found
