"""Groups of an iteration: credited once, and then what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perturn.credit import Credit
from perturn.data.groups import CreditRow, counted, counts_of, groups_of, read_credits, write_credits
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.policy.credits import carries_own_turns, make_loss, named_credit, trains_branches
from perturn.policy.critics import Critics, read_critics, write_critics
from perturn.run.branch import stored_branches
from perturn.run.credit import credit_groups, critics_in, explained
from perturn.run.length_limit import too_long
from perturn.run.measure import measured
from perturn.run.members import failures_of, members_of
from perturn.run.progress import mention
from perturn.run.quantities import compute_needed
from perturn.run.session import Session
from perturn.settings.making import Made
from perturn.settings.recipe import Recipe
from perturn.settings.stages import Stage, mark, policy_of, traits_of
from perturn.types import Trajectory, WeightedTrajectory


def own_credit(recipe: Recipe) -> tuple[str, Credit]:
    """The name of a recipe's credit, and the credit.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, or it cannot weigh groups here.
    """
    assert recipe.align is not None
    return named_credit(recipe.align.loss, recipe.credit)


def files_of(run: Run, stage: Stage) -> tuple[Path, Path]:
    """Files of the stage that weighs groups: the credits, and the critics that go on."""
    name, _ = own_credit(run.recipe)
    return run.paths.credit(name, stage.mark), run.paths.critics(stage.mark)


def trained_branches(run: Run, mark: str) -> list[Trajectory]:
    """The branches of an iteration, where the recipe's credit trains on them; else none."""
    return stored_branches(run.paths, run.recipe, mark) if trains_branches(own_credit(run.recipe)[1]) else []


def weigh(session: Session, stage: Stage, made: Made, counts: dict[str, Any]) -> None:
    """Weigh the turns of an iteration's groups, account for every episode, and write the credits.

    Args:
        session: The run.
        stage: The stage that makes the rows.
        made: Members of the groups, and which of them are not trained.
        counts: Of the stage, which grow.
    """
    run, traits = session.run, traits_of(session.recipe)
    assert traits is not None
    _, credit = own_credit(session.recipe)
    file, kept = files_of(run, stage)
    episodes = measured(run.recipe, made.rows)
    comparable = counted(episodes, traits.failed)
    needed = compute_needed(
        credit,
        comparable,
        run.paths,
        run.recipe,
        reference=stage.reference,
        acted=policy_of(run.recipe, stage.iteration - 1),
        judged=policy_of(run.recipe, 0),
        iteration=stage.iteration,
        critics=_critics_before(run, credit, stage),
    )
    rows = credit_groups(
        episodes,
        credit,
        needed,
        drop_equal_outcomes=traits.drop_equal_outcomes,
        too_long=too_long(session.recipe, episodes),
        filtered=made.filtered,
        failures=traits.failed,
    )
    counts |= counts_of(groups_of(episodes), rows, traits.failed)
    said = (f"{key.replace('_', ' ')} {count}" for key, count in counts.items() if count)
    mention("episodes:", ", ".join(said))
    for key, number in explained(credit, comparable, needed).items():
        if number is not None:
            counts[key] = round(number, 4)
            mention(f"values: {key.replace('_', ' ')} {number:.3f}, each by other episodes")
    critics = critics_in(needed)
    if critics is not None:
        write_critics(kept, critics)
    write_credits(file, rows)


def _critics_before(run: Run, credit: Credit, stage: Stage) -> Critics | None:
    """The critics that the iteration before left; None where none have begun, and where the credit reads none.

    Raises:
        RunError: If they are not there.
    """
    earlier = [mark(run.recipe, iteration) for iteration in range(1, stage.iteration)]
    if "critics" not in credit.needs or not earlier:
        return None
    file = run.paths.critics(earlier[-1])
    explored = (run.paths.trajectories(f"explore{each}") for each in earlier)
    failures = failures_of(run.recipe)
    if not file.is_file() and not any(
        one.turns for each in explored for one in counted(read_trajectories(each), failures)
    ):
        return None
    return read_critics(file)


def _played(run: Run, credit: Credit, mark: str) -> list[Trajectory]:
    """The members of an iteration's groups: explored episodes, and branches where the credit trains these too."""
    explored = list(read_trajectories(run.paths.trajectories(f"explore{mark}")))
    return members_of(credit, explored, run.paths, run.recipe, mark)


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
    if make_loss(run.recipe.align.loss, "align.loss").traits.needs_reference:
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
