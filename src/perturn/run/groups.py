"""Groups of an iteration: credited once, and then what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perturn.credit import Credit
from perturn.data.groups import CreditRow, counted, counts_of, groups_of, read_credits, write_credits
from perturn.data.run_folder import Run, base_of
from perturn.data.store import read_trajectories
from perturn.errors import DataError
from perturn.losses import LOSSES
from perturn.policy.credits import carries_own_turns, named_credit
from perturn.policy.models import context_length, empty_model
from perturn.policy.tokens import Renderer
from perturn.quantities import carried_by, compute, figures_of, given
from perturn.quantities.protocol import State
from perturn.run.credit import credit_groups
from perturn.run.measure import measured
from perturn.run.members import failures_of, members_of
from perturn.run.progress import mention
from perturn.run.quantity_source import RunSource, read_state, states_of, write_state
from perturn.run.session import Session, make_renderer
from perturn.run.signals import left_out
from perturn.settings.parsing import build
from perturn.settings.recipe import Recipe
from perturn.settings.stages import Stage, mark
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory


def own_credit(recipe: Recipe) -> tuple[str, Credit]:
    """The name of a recipe's credit, and the credit.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, or it cannot weigh groups here.
    """
    assert recipe.align is not None
    return named_credit(recipe.align.loss, recipe.credit)


def credit(session: Session, stage: Stage) -> None:
    """Weigh the turns of an iteration's groups, and account for every episode."""
    run, settings = session.run, session.recipe.groups
    assert settings is not None
    name, credit = own_credit(session.recipe)
    file = run.paths.credit(name, stage.mark)
    carried = carried_by(credit.needs)
    with run.stage(stage.name, file, *(run.paths.carried(key, stage.mark) for key in carried)) as counts:
        played = _played(run, credit, stage.mark)
        episodes = measured(run.recipe, played)
        comparable = counted(episodes, settings.failed)
        before = _states_before(run, carried, stage)
        source = RunSource(run.paths, run.recipe, stage.iteration, reference=stage.reference, states=before)
        computed = compute(credit.needs, comparable, source)
        rows = credit_groups(
            episodes,
            credit,
            given(computed),
            drop_equal_outcomes=settings.drop_equal_outcomes,
            too_long=too_long(session.recipe, episodes),
            filtered=left_out(episodes, settings.signals),
            failures=settings.failed,
        )
        counts |= counts_of(groups_of(episodes), rows, settings.failed)
        said = (f"{key.replace('_', ' ')} {count}" for key, count in counts.items() if count)
        mention("episodes:", ", ".join(said))
        for key, number in figures_of(computed).items():
            if number is not None:
                counts[key] = round(number, 4)
                mention(f"values: {key.replace('_', ' ')} {number:.3f}, each by other episodes")
        for key, state in states_of(computed).items():
            write_state(run.paths.carried(key, stage.mark), state)
        write_credits(file, rows)


def _states_before(run: Run, carried: Sequence[str], stage: Stage) -> dict[str, State]:
    """What quantities have learned in the iteration before, by name; nothing where none has begun.

    Raises:
        RunError: If it is not there.
    """
    earlier = [mark(run.recipe, iteration) for iteration in range(1, stage.iteration)]
    if not earlier:
        return {}
    files = {name: run.paths.carried(name, earlier[-1]) for name in carried}
    explored = [run.paths.trajectories(f"explore{each}") for each in earlier]
    if not any(file.is_file() for file in files.values()) and not any(
        one.turns for each in explored for one in counted(read_trajectories(each), failures_of(run.recipe))
    ):
        return {}
    return {name: read_state(file, name) for name, file in files.items()}


def _played(run: Run, credit: Credit, mark: str) -> list[Trajectory]:
    """The members of an iteration's groups: explored episodes, and branches where the credit trains these too."""
    explored = list(read_trajectories(run.paths.trajectories(f"explore{mark}")))
    return members_of(credit, explored, run.paths, run.recipe, mark)


def too_long(recipe: Recipe, episodes: Sequence[Trajectory]) -> set[tuple[str, int]]:
    """Keys of the episodes whose first turn, or first after another's, does not fit the length limit of training."""
    limit = _limit(recipe)
    if limit is None:
        return set()
    renderer = make_renderer(recipe, base_of(recipe))
    begun = (replace(one, turns=one.turns[: one.taken_over + 1]) for one in episodes if one.turns)
    return {one.key for one in begun if renderer.encode(one).longest > limit}


def alike_within_limit(recipe: Recipe, pairs: Sequence[PreferencePair]) -> list[bool]:
    """Whether the sides of each pair are the same tokens within the length limit of training, and part behind it.

    A pair of which a first turn does not fit is none of these; training refuses it, and says so.
    """
    limit = _limit(recipe)
    if limit is None:
        return [False] * len(pairs)
    renderer = make_renderer(recipe, base_of(recipe))
    sides = [[_fitting_ids(renderer, side, limit) for side in (pair.chosen, pair.rejected)] for pair in pairs]
    return [one is not None and one == other for one, other in sides]


def _fitting_ids(renderer: Renderer, side: Trajectory, limit: int) -> tuple[int, ...] | None:
    """Tokens of the turns that fit; None where not even the first one does."""
    try:
        return renderer.encode(side, limit).ids
    except DataError:
        return None


def _limit(recipe: Recipe) -> int | None:
    """Longest sequence of training, in tokens; None: any."""
    return recipe.model.max_length or context_length(empty_model(base_of(recipe)))


def read_groups(run: Run, stage: Stage) -> tuple[list[WeightedTrajectory], int]:
    """The trajectories of an iteration that are trained, with their weights, and how many episodes were asked for.

    Where the loss keeps the policy near a reference, episodes without spread take part in KL alone, if they fit the
    length limit.
    """
    name, credit = own_credit(run.recipe)
    credited = read_credits(run.paths.credit(name, stage.mark))
    played = {one.key: one for one in _played(run, credit, stage.mark)}
    trained = [_row(played[row.key], credit, row) for row in credited if row.bin == "trained"]
    assert run.recipe.align is not None
    if build(LOSSES, run.recipe.align.loss, "align.loss").needs_reference:
        still = [played[row.key] for row in credited if row.bin == "no_spread" and played[row.key].turns]
        cut = too_long(run.recipe, still)
        trained += [_row(one, credit, None) for one in still if one.key not in cut]
    return trained, len(credited)


def _row(played: Trajectory, credit: Credit, row: CreditRow | None) -> WeightedTrajectory:
    """An episode with what a credit wrote of it; None: it has no spread, and takes part in KL alone."""
    own_turns = carries_own_turns(credit, played)
    if row is None:
        none = (0.0,) * len(played.turns)
        return WeightedTrajectory(played, none, own_turns=own_turns, has_spread=False)
    return WeightedTrajectory(played, row.weight, row.clip, own_turns)
