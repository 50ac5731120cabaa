"""Predicted time of a run with `staleness` > 0, in which exploration and training overlap."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from perturn.config.recipe import Recipe
from perturn.estimate.episode_lengths import Episodes
from perturn.estimate.loop_simulator import Loop, episode_turns, expected_seconds
from perturn.estimate.memory import ModelShape
from perturn.estimate.stage_costs import LAUNCH_SECONDS, LOADED_BYTES
from perturn.run.served_policy import engine_settings, handed_rank


def predict(recipe: Recipe, found: Episodes, exploring: float, others: Iterable[float]) -> str:
    """Return a sentence with the simulated time of all iterations of a recipe with `staleness` > 0.

    Args:
        recipe: Recipe of the run.
        found: Number and lengths of episodes.
        exploring: Seconds of one exploration without overlap.
        others: Seconds of the stages besides exploration, over all iterations.
    """
    assert recipe.explore is not None
    slots = min(recipe.explore.concurrency, found.explore)
    shortest, longest = sorted((found.turns, found.limit))
    counts, answers = found.turn_counts, found.answer_tokens or (1,)
    turns = max(1.0, fmean(counts) if counts else (shortest + longest) / 2)
    turn = exploring * slots / (found.explore * turns)
    steps = [min(turn, each) for each in found.step_seconds or (found.seconds,)]
    a_token = (turn - fmean(steps)) / fmean(answers)
    episode = episode_turns(
        lambda random: random.choice(counts) if counts else max(1.0, random.uniform(shortest, longest)),
        lambda random: a_token * random.choice(answers),
        lambda random: random.choice(steps),
    )
    apart, taking_turns = (
        expected_seconds(loop_of(recipe, found, sum(others) / recipe.iterations, staleness), episode)
        for staleness in (recipe.staleness, 0)
    )
    known = "turns as recorded" if counts else "turns between the expert's and the limit"
    timed = f"a constant {steps[0]:.2g} s for each environment step"
    if found.step_seconds:
        timed = f"times of {len(steps)} environment steps as measured now"
    elif not steps[0]:
        timed = "environment steps were not timed, and count as 0 s"
    return (
        f"Prediction: with staleness={recipe.staleness} the iterations take {100 * apart / taking_turns:.0f} % of the "
        f"time above, by a simulation of the loop ({known}; {timed}), if the engine and the trainer have devices of "
        "their own. On one device they share its speed, and only the time in which the engine waits for worlds is "
        "gained."
    )


def loop_of(recipe: Recipe, found: Episodes, train: float, staleness: int) -> Loop:
    """Return the parameters of a recipe's simulated loop.

    Args:
        recipe: Recipe of the run. Each copy of the policy answers all its prompts at the same time.
        found: Number of episodes.
        train: Seconds from an iteration's last episode to its new policy.
        staleness: Largest lag of a token.
    """
    assert recipe.explore is not None
    slots = min(recipe.explore.concurrency, found.explore)
    return Loop(recipe.iterations, found.explore, slots, train, staleness, replicas=copies_of(recipe))


def copies_of(recipe: Recipe) -> int:
    """Return the number of copies of the policy that play at the same time, on nodes of a cluster or in the engine."""
    return replicas_of(recipe) or engine_settings(recipe).traits.copies


def replicas_of(recipe: Recipe) -> int:
    """Return the number of replicas of the policy on a cluster's nodes; 0 if the engine is in this process."""
    return 0 if recipe.cluster is None else recipe.cluster.engines


def side_by_side(recipe: Recipe, shape: ModelShape) -> list[str]:
    """Return sentences on replicas, training processes, and the transfer of weights to the engine.

    Args:
        recipe: Recipe of the run.
        shape: Sizes of the model.
    """
    lines = []
    if (copies := copies_of(recipe)) > 1:
        lines.append(f"Prediction: {copies} replicas play, each as fast as an engine on this machine.")
    if recipe.launch.processes > 1:
        lines.append(
            f"Prediction: {recipe.launch.processes} processes share the passes of a training if each has a GPU, and "
            f"the cores of this machine if not; they start within {LAUNCH_SECONDS:.0f} s."
        )
    if recipe.iterations > 1 and recipe.align is not None:
        rank = handed_rank(recipe)
        weights = 4 * (shape.adapters(rank) if rank else shape.parameters)
        most = "up to " * (rank > (recipe.align.lora.rank if recipe.align.lora else 0))  # ranks add up
        lines.append(
            f"Prediction: each iteration passes {most}{weights / 1e9:.2g} GB of {'adapters' if rank else 'weights'} to "
            f"the engine {handover_of(recipe)} {most or 'about '}{2 * weights / LOADED_BYTES:.0f} s of the time above."
        )
    return lines


def handover_of(recipe: Recipe) -> str:
    """Return how an iteration's weights get to the engine, and the beginning of a sentence on the time."""
    if engine_settings(recipe).traits.takes_models:
        how = recipe.engine.get("handover")
        return (
            f"from GPU to GPU{f' (engine.handover={how})' if how else ''}, and writes the file too. The transfer was "
            "never measured; writing and reading the file takes"
        )
    if replicas_of(recipe):
        return "through a file, which Ray sends to the nodes. Writing and reading the file takes"
    return "through a file. This takes"
