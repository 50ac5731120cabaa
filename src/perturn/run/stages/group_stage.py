"""Compute and store the turn weights of an iteration's groups, and read them for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perturn.chat.tokens import Encoded, Renderer
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import Made
from perturn.config.stages import Stage, mark, traits_of
from perturn.credit import Credit
from perturn.data.group_account import BINS, CreditRow, counts_of, read_credits, write_credits
from perturn.data.run_folder import Run, base_of
from perturn.data.store import read_trajectories
from perturn.data.token_lag import lag_figures, stale_keys
from perturn.display.progress_bars import mention, track
from perturn.errors import DataError, ModelError
from perturn.group import counted, groups_of
from perturn.policy.examples import differ_early
from perturn.policy.models import empty_model
from perturn.quantities import carried_by, compute, figures_of, given
from perturn.quantities.protocol import State
from perturn.run.served_policy import engine_settings
from perturn.run.session import Session, make_renderer
from perturn.run.stages.branch_stage import stored_branches
from perturn.run.stages.credit_stage import credit_groups
from perturn.run.stages.measure_distance import measured
from perturn.run.stages.model_checks import own_limit
from perturn.run.stages.quantity_source import (
    RunSource,
    failures_of,
    free_engine_memory,
    members_of,
    read_state,
    states_of,
    write_state,
)
from perturn.training.credit_choice import carries_own_turns, make_loss, named_credit
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory


def own_credit(recipe: Recipe) -> tuple[str, Credit]:
    """Return the name of a recipe's credit, and the credit itself."""
    assert recipe.align is not None
    return named_credit(recipe.align.loss, recipe.credit)


def files_of(run: Run, stage: Stage) -> list[Path]:
    """Return the files of the stage that weighs groups: turn weights, and learned states for the next iteration."""
    name, credit = own_credit(run.recipe)
    carried = (run.paths.carried(key, stage.mark) for key in carried_by(credit.needs))
    return [run.paths.credit(name, stage.mark), *carried]


def trained_branches(run: Run, mark: str) -> list[Trajectory]:
    """Return the branches of an iteration if the recipe's credit trains on them; otherwise an empty list."""
    _, credit = own_credit(run.recipe)
    return stored_branches(run.paths, run.recipe, mark) if credit.traits.trains_branches else []


def weigh(session: Session, stage: Stage, made: Made, counts: dict[str, Any]) -> None:
    """Compute the turn weights of an iteration's groups, account for every episode, and write the result.

    Args:
        session: The run.
        stage: The stage that makes the rows.
        made: Members of the groups, with the keys of members that are not trained on.
        counts: Counts of the stage, which are extended in place.
    """
    run, traits = session.run, traits_of(session.recipe)
    assert traits is not None
    name, credit = own_credit(session.recipe)
    most = session.recipe.staleness
    before = _states_before(run, carried_by(credit.needs), stage)
    episodes = measured(run.recipe, made.rows)
    free_engine_memory(session, credit.needs)
    source = RunSource(run.paths, run.recipe, stage.iteration, reference=stage.reference, states=before)
    computed = compute(credit.needs, counted(episodes, traits.failed), source)
    rows = credit_groups(
        episodes,
        credit,
        given(computed),
        drop_equal_outcomes=traits.drop_equal_outcomes,
        too_long=LengthLimit(session.recipe).too_long(episodes),
        filtered=made.filtered,
        stale=stale_keys(groups_of(episodes), stage.iteration - 1, most) if most else (),
        failures=traits.failed,
    )
    counts |= counts_of(groups_of(episodes), rows, traits.failed)
    trained = {row.key for row in rows if row.bin == "trained"}
    counts |= lag_figures((one for one in episodes if one.key in trained), stage.iteration - 1)
    _say(counts)
    if credit.traits.compares_states:
        _warn_of_missing_states(name, [one for one in episodes if one.key in trained])
    for key, number in figures_of(computed).items():
        if number is not None:
            counts[key] = round(number, 4)
            mention(f"values: {key.replace('_', ' ')} {number:.3f}, each by other episodes")
    for key, state in states_of(computed).items():
        write_state(run.paths.carried(key, stage.mark), state)
    write_credits(run.paths.credit(name, stage.mark), rows)


def _warn_of_missing_states(name: str, episodes: Sequence[Trajectory]) -> None:
    """Print how many turns have no state key, by which the credit compares turns."""
    keys = [turn.state_key for one in episodes for turn in one.turns]
    if missing := keys.count(None):
        mention(
            f"[yellow]{missing} of {len(keys)} trained turns have no state key, so {name} compares them with no other "
            "turn. Keys come from the environment, or from the agent's program (PUT /state).[/]"
        )


def _say(counts: Mapping[str, Any]) -> None:
    """Print how many episodes are trained on and why others are not, the groups, and what to do if none is."""
    groups = {
        "alone": "of one episode",
        "equal_outcomes": "with equal outcomes",
        "zero_credit": "with all weights 0",
    }
    bins = {"trained": "trained on", "no_spread": "in groups with all weights 0"}
    own = {"asked", "groups", *BINS, *groups}
    of_bins = [f"{counts[key]} {bins.get(key, key)}" for key in BINS if counts[key]]
    of_groups = [f"{counts[key]} {says}" for key, says in groups.items() if counts[key]]
    for name, total, parts in (("episodes", "asked", of_bins), ("groups", "groups", of_groups)):
        mention(f"{name}: {counts[total]}{', of which ' if parts else ''}{', '.join(parts)}")
    if more := [
        f"{key.replace('_', ' ')} {count}" for key, count in counts.items() if key not in own and count
    ]:
        mention("also:", ", ".join(more))
    if counts["asked"] == counts["no_spread"] > 0:
        mention(
            "[yellow]The weights of all turns are 0, since no episode of a task did better than another. Increase "
            "explore.samples, or explore tasks of which the policy solves some.[/]"
        )


def _states_before(run: Run, carried: Sequence[str], stage: Stage) -> dict[str, State]:
    """Return the learned states of quantities from the previous iteration, by name; empty if nothing was learned."""
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
    """Return the members of an iteration's groups: explored episodes and, if the credit trains on them, branches."""
    explored = list(read_trajectories(run.paths.trajectories(f"explore{mark}")))
    return members_of(credit, explored, run.paths, run.recipe, mark)


def read_groups(run: Run, stage: Stage) -> tuple[list[WeightedTrajectory], int]:
    """Return an iteration's trajectories to train on, with weights, and the number of requested episodes.

    If the loss has a KL term to a reference, episodes without spread count in this term alone. They must fit the length
    limit.
    """
    name, credit = own_credit(run.recipe)
    credited = read_credits(run.paths.credit(name, stage.mark))
    played = {one.key: one for one in _played(run, credit, stage.mark)}
    trained = [_row(played[row.key], credit, row) for row in credited if row.bin == "trained"]
    assert run.recipe.align is not None
    if make_loss(run.recipe.align.loss, "align.loss").traits.needs_reference:
        still = [played[row.key] for row in credited if row.bin == "no_spread" and played[row.key].turns]
        cut = LengthLimit(run.recipe).too_long(still)
        trained += [_row(one, credit, None) for one in still if one.key not in cut]
    return trained, len(credited)


def _row(played: Trajectory, credit: Credit, row: CreditRow | None) -> WeightedTrajectory:
    """Return an episode with its weights; without a row, with weights of 0, so that it counts in the KL term alone."""
    own_turns = carries_own_turns(credit, played)
    if row is None:
        none = (0.0,) * len(played.turns)
        return WeightedTrajectory(played, none, own_turns=own_turns, has_spread=False)
    return WeightedTrajectory(played, row.weight, row.clip, own_turns)


class LengthLimit:
    """The length limit of a recipe's training. The tokenizer is loaded once, when it is first needed."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @cached_property
    def most(self) -> int | None:
        """Largest length of a sequence, in tokens; None without a limit, or without the policy's tokenizer."""
        if not engine_settings(self._recipe).traits.serves_checkpoints:
            return None
        return self._recipe.model.max_length or own_limit(self._recipe, empty_model(base_of(self._recipe)))

    @cached_property
    def _renderer(self) -> Renderer:
        return make_renderer(self._recipe, base_of(self._recipe))

    def too_long(self, episodes: Sequence[Trajectory]) -> set[tuple[str, int]]:
        """Return the keys of the episodes whose first own turn does not fit, or whose answers are all cut or empty."""
        if self.most is None:
            return set()
        begun = (replace(one, turns=one.turns[: one.taken_over + 1]) for one in episodes if one.turns)
        unfit = {one.key for one in track(begun, "length limit", "episodes") if not self._can_fit(one)}
        return unfit | {one.key for one in episodes if one.turns and not _has_loss(one)}

    def _can_fit(self, one: Trajectory) -> bool:
        """Return whether a whole episode fits, or has no tokens: training rejects it with the error."""
        try:
            return self.whole(one)
        except (DataError, ModelError):
            return True

    def whole(self, one: Trajectory) -> bool:
        """Return whether a whole episode fits."""
        return self.most is None or self._renderer.encode(one, every_turn=True).longest <= self.most

    def equal(self, pairs: Sequence[PreferencePair]) -> list[bool]:
        """Return, for each pair, whether its sides do not differ within the limit, see `Limit.equal` [pairs]."""
        if self.most is None:
            return [False] * len(pairs)
        return [self._is_equal(pair) for pair in track(pairs, "length limit", "pairs")]

    def _is_equal(self, pair: PreferencePair) -> bool:
        sides = pair.chosen, pair.rejected
        if not all(map(_has_loss, sides)):
            return True
        try:
            if differ_early(pair, self._renderer, self.most):
                return False
            if not all(self.whole(replace(side, turns=side.turns[:1])) for side in sides):
                return True
            one, other = (self._renderer.encode(side, self.most, every_turn=True) for side in sides)
        except (DataError, ModelError):  # training rejects the pair with this error
            return False
        if one.dropped_turns or other.dropped_turns or any(side.taken_over for side in sides):
            return _are_equal(one, other)
        said = [[turn.action.text for turn in side.turns] for side in sides]
        return said[0] == said[1] and _are_equal(
            one, other
        )  # of equal tokens for other texts, training tells


def _has_loss(one: Trajectory) -> bool:
    return any(turn.carries_loss for turn in one.turns)


def _are_equal(one: Encoded, other: Encoded) -> bool:
    """Return whether two sides have the same tokens, or one was cut and the other begins with all of its tokens."""
    short, long = sorted((one, other), key=lambda side: len(side.ids))
    begins = long.ids[: len(short.ids)] == short.ids
    return begins and (len(short.ids) == len(long.ids) or short.dropped_turns > 0)
