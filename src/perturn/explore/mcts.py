"""Search the tree of each explored episode: every next episode is played on from where the last ones say (MCTS)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from perturn.data.pairs import branches_of
from perturn.data.store import read_trajectories
from perturn.data.tree import grow, next_node
from perturn.episodes.play import Job
from perturn.episodes.seeds import seed_of
from perturn.run.session import Session
from perturn.settings.branch import Branch
from perturn.settings.stages import Stage
from perturn.types import Trajectory, came_back, came_elsewhere, failed, succeeded


def search(session: Session, stage: Stage, explored: Iterable[Trajectory]) -> dict[str, int]:
    """Let the stage's policy play episodes of each tree, one after another; all trees grow at the same time.

    Args:
        session: The run.
        stage: The stage `branch`.
        explored: Episodes that were explored.

    Returns:
        Counts of what was played; `exhausted`: trees that had nothing left to try, or whose world did not come back.
    """
    recipe, file = session.recipe, session.run.paths.trajectories(stage.name)
    assert recipe.branch is not None
    assert recipe.branch.search is not None
    assert recipe.explore is not None
    how, simulations = recipe.explore, recipe.branch.search.simulations
    begun = trees_of(explored, recipe.branch)
    counts: dict[str, int] = {}
    for number in range(simulations):
        played = list(read_trajectories(file)) if file.exists() else []
        jobs = search_jobs(begun, played, recipe.branch, recipe.seed, how.samples, stage.iteration, number)
        what = f"simulations {number + 1} of {simulations}"
        counts = session.play(file, jobs, stage.policy, how.sampling, how.concurrency, what)
        counts["exhausted"] = len(begun) - len(jobs)
    return counts


def trees_of(explored: Iterable[Trajectory], settings: Branch) -> list[Trajectory]:
    """The explored episodes that trees are grown from, in the order of their keys."""
    kept = [one for one in explored if not failed(one) and not (settings.of == "failures" and succeeded(one))]
    return sorted(kept, key=lambda one: one.key)


def search_jobs(
    explored: Sequence[Trajectory],
    played: Iterable[Trajectory],
    settings: Branch,
    seed: int,
    samples: int = 1,
    iteration: int = 1,
    number: int = 0,
) -> list[Job]:
    """The next episode of each tree.

    Args:
        explored: Episodes that trees are grown from.
        played: Those that were played on in any of these trees, in any order; of a tree, those before `number` are
            read, so that a tree which was interrupted grows on as it would have.
        settings: How to search.
        seed: Of the run.
        samples: Explored episodes of a task, whose numbers the new ones do not take.
        iteration: From 1.
        number: Of the episode in its tree, from 0.

    Returns:
        One job a tree in which there is something left to try, and whose world always came back.
    """
    assert settings.search is not None
    jobs = []
    for one, by_turn in zip(explored, branches_of(explored, played), strict=True):
        sample = one.sample + samples * (1 + number)
        before = [each for found in by_turn.values() for each in found if each.sample < sample]
        if any(map(came_elsewhere, before)):
            continue
        root = grow(one, filter(came_back, before))
        node = next_node(root, settings.search.width, settings.search.exploration)
        if node is not None and node.example is not None:
            begun = replace(node.example, sample=one.sample)
            drawn = seed_of(seed, one.task.id, sample, iteration)
            jobs.append(Job(one.task, drawn, sample, begun, node.depth))
    return jobs
