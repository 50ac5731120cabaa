"""The turns that explored episodes are played on from, chosen by what the policy that explored knew at each.

Whether a turn is chosen depends on the episode up to its prompt, on other episodes and on chance, and on nothing that
came after. So an average over branches is no guess of how the explored episode ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

from perturn.data.forks import Forks
from perturn.data.store import read_records, write_records
from perturn.errors import ConfigError
from perturn.policy.values import explained_variance
from perturn.quantities.entropy import entropies_of
from perturn.quantities.readers import Reader
from perturn.run.panels import seed_of
from perturn.run.prospects import by_prospects
from perturn.run.quantity_source import open_policy
from perturn.run.session import Session, engine_settings
from perturn.settings.branch import Branch
from perturn.settings.recipe import Recipe
from perturn.settings.stages import Stage, policy_of
from perturn.types import Trajectory, failed, succeeded, unfinished

LEAST = 3
"""Tasks, or episodes, that a predictor of outcomes needs: those that are told of, and two that its choices are compared
with."""


def check_forks(recipe: Recipe, tasks: int) -> None:
    """Refuse a choice by a policy that cannot be read, or by what too few others did.

    Args:
        recipe: With a section `branch`.
        tasks: That an iteration explores.

    Raises:
        ConfigError: Saying what to set.
    """
    assert recipe.branch is not None
    assert recipe.explore is not None
    at = recipe.branch.at
    if recipe.branch.reads_policy and not engine_settings(recipe).serves_checkpoints:
        raise ConfigError(
            f"branch.at={at} reads the policy that explored, and engine {recipe.engine['name']!r} serves one that "
            "cannot be read here; take engine.name=local, or branch.at=every."
        )
    others = tasks if recipe.branch.others == "tasks" else tasks * recipe.explore.samples
    if at == "mixed" and 0 < others < LEAST:
        raise ConfigError(
            f"branch.at=mixed learns from other {recipe.branch.others} of an iteration, of which there must be "
            f"{LEAST} or more, got {others}; explore more tasks."
        )


def forks_of(session: Session, stage: Stage, begun: Sequence[Trajectory]) -> list[Forks]:
    """The turns of each explored episode that are played on from.

    They are written down before any is, so that a stage which was stopped goes on with the same.

    Args:
        session: The run.
        stage: The stage `branch`.
        begun: Episodes that were explored.

    Returns:
        One entry an episode that did not fail, by task and sample; without turns where it is not played on.
    """
    run, recipe = session.run, session.recipe
    assert recipe.branch is not None
    file = run.paths.forks(stage.mark)
    played = sorted((one for one in begun if not failed(one)), key=lambda one: one.key)
    if file.is_file():
        found = list(read_records(file, Forks))
        if [each.key for each in found] == [one.key for one in played]:
            return found
    reader = open_policy(run.paths, recipe, policy_of(recipe, stage.iteration - 1))
    choose = by_entropy if recipe.branch.at == "entropy" else by_prospects
    write_records(file, choose(played, reader, recipe.branch, recipe.seed, stage.iteration))
    return list(read_records(file, Forks))


def by_entropy(
    played: Sequence[Trajectory], reader: Reader, settings: Branch, seed: int, iteration: int
) -> list[Forks]:
    """Turns by a chance that grows with the entropy of the policy at their prompts; see `uncertain_turns`."""
    found = []
    for one, seen in zip(played, entropies_of(played, reader), strict=True):
        turns = [] if _left_alone(one, settings) else uncertain_turns(one, seen, settings, seed, iteration)
        found.append(Forks(*one.key, tuple(turns), tuple(seen)))
    return found


def uncertain_turns(
    one: Trajectory, entropies: Sequence[float], settings: Branch, seed: int, iteration: int = 1
) -> list[int]:
    """Turns of an episode by a chance that grows with their entropy, the first so many of them.

        u_t < chance + gain (H_t - H_0),   u_t even between 0 and 1

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes on
    its code: rand - 0.2 (H_t - H_0) <= 0.5.
    Differs: H is of the first token of the action, and in the mean over what could be said; the episode's budget goes
    to its first such turns.

    Args:
        one: The explored episode.
        entropies: Of each of its turns, without unit [turns].
        settings: `chance`, `gain` and `forks`.
        seed: Of the run.
        iteration: From 1.
    """
    found: list[int] = []
    for turn in range(1, len(entropies)):
        chance = settings.chance + settings.gain * (entropies[turn] - entropies[0])
        if len(found) < settings.forks and seed_of(seed, *one.key, iteration, "fork", turn) < chance * 2**32:
            found.append(turn)
    return found


def fork_counts(
    found: Sequence[Forks], settings: Branch, begun: Iterable[Trajectory], branches: Iterable[Trajectory]
) -> dict[str, float]:
    """How many turns were played on from, where they are, and how they differ from the others.

    Args:
        found: From `forks_of`.
        settings: Of the recipe.
        begun: Episodes that were explored.
        branches: Those that were played on from the turns.

    Returns:
        `forks`, `forked` (episodes with any), `mean_turn` (0 for the first). With entropy `entropy` and
        `entropy_elsewhere`, means over these turns and over the others that could have been. With mixed
        `explained_variance`, of successes by the predictor, `predicted`, its mean chance at these turns, and
        `came_true`, the share of branches that succeeded. Where nothing is to be counted, it is left out.
    """
    ends = {one.key: succeeded(one) for one in begun}
    at = [each.seen[turn] for each in found for turn in each.turns]
    turns = [turn for each in found for turn in each.turns]
    counts: dict[str, float | None] = {
        "forks": len(turns),
        "forked": sum(bool(each.turns) for each in found),
        "mean_turn": _mean(turns),
    }
    if settings.at == "entropy":
        open_ = [each for each in found if not (settings.of == "failures" and ends[each.key])]
        rest = [seen for each in open_ for turn, seen in enumerate(each.seen) if turn not in (0, *each.turns)]
        counts |= {"entropy": _mean(at), "entropy_elsewhere": _mean(rest)}
    else:
        told = [[[seen] for seen in each.seen] for each in found]
        true = [[[float(ends[each.key])] for _ in each.seen] for each in found]
        counts |= {"explained_variance": explained_variance(told, true), "predicted": _mean(at)}
        counts |= {
            "came_true": _mean(
                [succeeded(one) for one in branches if not failed(one) and not unfinished(one)]
            )
        }
    return {name: round(count, 4) for name, count in counts.items() if count is not None}


def _left_alone(one: Trajectory, settings: Branch) -> bool:
    """Whether an episode is not played on, whatever it holds."""
    return settings.of == "failures" and succeeded(one)


def _mean(numbers: Sequence[float]) -> float | None:
    return fsum(numbers) / len(numbers) if numbers else None
