"""Predicted time of a run with `staleness`, where exploration and training overlap."""

from __future__ import annotations

from collections.abc import Iterable

from perturn.config.recipe import Recipe
from perturn.estimate.episode_lengths import Episodes
from perturn.estimate.loop_simulator import Loop, episode_seconds, expected_seconds


def predict(recipe: Recipe, found: Episodes, exploring: float, others: Iterable[float]) -> str:
    """Return what a simulation says of the iterations of a recipe with `staleness`, as a sentence.

    Args:
        recipe: Of the run.
        found: Number and lengths of episodes.
        exploring: Seconds of one exploration by itself.
        others: Seconds of the other stages of all iterations.
    """
    assert recipe.explore is not None
    slots = min(recipe.explore.concurrency, found.explore)
    shortest, longest = sorted((found.turns, found.limit))
    turns = max(1.0, (shortest + longest) / 2)
    turn = exploring * slots / (found.explore * turns)
    episode = episode_seconds(
        lambda random: max(1.0, random.uniform(shortest, longest)), lambda random: turn, lambda random: 0.0
    )
    train = sum(others) / recipe.iterations
    apart, taking_turns = (
        expected_seconds(Loop(recipe.iterations, found.explore, slots, train, staleness), episode)
        for staleness in (recipe.staleness, 0)
    )
    return (
        f"Prediction: with staleness={recipe.staleness} the iterations take {100 * apart / taking_turns:.0f} % of the "
        "time above, by a simulation of the loop, if the engine and the trainer have devices of their own. On one "
        "device they share its speed, and only the time in which the engine waits for worlds is gained."
    )
