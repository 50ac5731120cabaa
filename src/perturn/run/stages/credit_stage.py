"""Compute turn weights for a run's stored groups, with the credit of its recipe or any other credit."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from perturn.config.overrides import apply_overrides
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import RowInputs, RowMaker, sense_in
from perturn.config.stages import Stage, makes, stages
from perturn.credit import Credit
from perturn.data.file_seals import done_stages, read_manifest, refuse_damage
from perturn.data.group_account import CreditRow, ledger, read_credits, write_credits
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import RunPaths, begun
from perturn.data.store import read_trajectories
from perturn.envs.abilities import check_abilities
from perturn.errors import ConfigError, RunError, check_fit
from perturn.faults import closing_world
from perturn.group import counted, groups_of
from perturn.quantities import (
    Computed,
    Planned,
    carried_by,
    check_needs,
    compute,
    figures_of,
    given,
    policies_of,
    wanted,
)
from perturn.quantities.protocol import ACTED, REFERENCE, START, State
from perturn.report.credit_figures import compare_credits, credit_summary
from perturn.run.session import world_maker
from perturn.run.stages.answer_form import answer_form
from perturn.run.stages.credit_checks import check_prover
from perturn.run.stages.measure_distance import measured
from perturn.run.stages.quantity_source import (
    RunSource,
    failures_of,
    members_of,
    path_of_policy,
    reference_of_iteration,
    states_of,
)
from perturn.table import name_of
from perturn.table_index import table
from perturn.training.credit_choice import make_credit
from perturn.training.sampled_rows import Needed, weigh_groups
from perturn.types import Trajectory, unfinished

_logger = logging.getLogger(__name__)


def credit_groups(
    trajectories: Sequence[Trajectory],
    credit: Credit,
    needed: Needed | None = None,
    *,
    drop_equal_outcomes: bool = False,
    too_long: Collection[tuple[str, int]] = (),
    filtered: Collection[tuple[str, int]] = (),
    stale: Collection[tuple[str, int]] = (),
    failures: str = "leave_out",
) -> list[CreditRow]:
    """Compute the weights of the turns of an iteration's episodes, and the category of each episode.

    Args:
        trajectories: All requested episodes, in any order.
        credit: The credit.
        needed: Quantities that the credit needs, by keyword, each with one entry for each trajectory that counts (see
            `perturn.data.group_account.counted`).
        drop_equal_outcomes: See `perturn.data.group_account.ledger`.
        too_long: See `perturn.data.group_account.ledger`.
        filtered: See `perturn.data.group_account.ledger`.
        stale: See `perturn.data.group_account.ledger`.
        failures: See `perturn.data.group_account.ledger`.

    Returns:
        One row for each episode, sorted by task and sample.

    Raises:
        ConfigError: If the credit raises, does not give each turn a finite weight, or cannot weigh unfinished episodes.
    """
    _refuse_unfinished(trajectories, credit)
    groups = groups_of(trajectories)
    weighed = weigh_groups(trajectories, groups, credit, needed or {}, failures)
    rows = [
        [weighed[index].row(one) for index, one in zip(group.indices, group, strict=True)] for group in groups
    ]
    weights, clips = (
        [[getattr(row, name) for row in of_group] for of_group in rows] for name in ("weight", "clip")
    )
    return ledger(
        groups,
        weights,
        clips,
        drop_equal_outcomes=drop_equal_outcomes,
        too_long=too_long,
        filtered=filtered,
        stale=stale,
        failures=failures,
    )


def _refuse_unfinished(trajectories: Sequence[Trajectory], credit: Credit) -> None:
    """Reject a credit that needs the outcomes of episodes, if some episodes are unfinished."""
    count = sum(map(unfinished, trajectories))
    if count and not credit.traits.takes_unfinished:
        raise ConfigError(
            f"{count} of {len(trajectories)} episodes go on in the next iteration, and credit {type(credit).__name__} "
            "weighs by how they end; take another credit, such as credit.name=turn-gae."
        )


def credit_run(
    folder: Path,
    words: Sequence[str],
    *,
    against: str | None = None,
    name: str | None = None,
    reference: str | None = None,
    drop_equal_outcomes: bool = False,
    writes: bool = True,
) -> dict[str, Any]:
    """Compute the turn weights of another credit for all explored episodes of a run.

    No other file of the run changes. The run's settings of `rows` apply, but not the length limit of its training. The
    filter of a row maker that reads quantities or expert episodes does not apply either, and a warning says so.

    Args:
        folder: The run folder; the run need not be finished.
        words: `credit.name=NAME` or `credit.name=MODULE:CLASS`, and settings of the credit, such as `credit.gamma=0.9`.
            Empty: the credit of the run.
        against: Another credit to compare with: the name of stored weights in the run, or of an entry of CREDITS, or
            `module:Class`. The weights of `module:Class` are always computed, since stored weights do not name their
            code.
        name: Name for the files of the weights. None: the name of the credit.
        reference: Policy of the run from which the credit's quantities are computed, such as values. None: the policy
            that explored; for a credit that reads `progress`, the iteration's reference policy.
        drop_equal_outcomes: See `perturn.data.group_account.ledger`.
        writes: Whether to write the weights to files.

    Returns:
        JSON data: the section `credit` and, for each iteration, file, counts, figures of the weights, and the
            comparison.

    Raises:
        PerturnError: If the run has explored nothing, or the credit cannot weigh its episodes.
    """
    paths, recipe = begun(folder), resolve_recipe(folder)
    section = _section(words) if words or recipe.credit is None else dict(recipe.credit)
    credit = _make_credit(section, recipe)
    label = _named(section, name, against)
    found, explored = [], explored_stages(paths, recipe)
    other = None if against is None else _against(paths, recipe, explored, against, reference)
    credits = [credit] if other is None else [credit, other.credit]
    for each in credits:
        _check_stored(each, recipe, explored, reference)
    if reference is not None:
        _check_reference(paths, recipe, credits, section["name"], reference)
    weigher = _Weigher(paths, recipe, credit, reference)
    _warn_of_filter(recipe)
    for stage in explored:
        episodes, computed, rows = weigher.weigh(stage, drop_equal_outcomes)
        file = paths.credit(label, stage.mark)
        if writes:
            _write_beside(paths, file, rows)
        summary = credit_summary(episodes, rows, failures_of(recipe))
        one = {"iteration": stage.iteration, "file": paths.name(file), **summary}
        one |= figures_of(computed)
        if against is not None:
            one["against"] = _compared(episodes, rows, _other(paths, stage, against, other))
        found.append(one)
    return {"run": str(folder), "credit": section, "against": against, "iterations": found}


def _compared(
    episodes: Sequence[Trajectory], rows: Sequence[CreditRow], theirs: Sequence[CreditRow]
) -> dict[str, Any]:
    """Return the comparison of two credits. Branches that the other credit did not weigh are left out."""
    keys = {row.key for row in theirs}
    both = [each for each in episodes if each.origin is None or each.key in keys]
    return compare_credits(both, rows, theirs).to_dict()


def _check_reference(
    paths: RunPaths, recipe: Recipe, credits: Sequence[Credit], name: str, reference: str
) -> None:
    """Reject a reference that no credit reads, or that is no policy of the run."""
    if not any(policies_of(each.needs) & {ACTED, REFERENCE, START} for each in credits):
        raise ConfigError(f"credit {name!r} reads no reference; leave --reference out.")
    path_of_policy(paths, recipe, reference)


def _warn_of_filter(recipe: Recipe) -> None:
    """Log a warning if the run's row maker may leave out episodes and reads inputs that `perturn credit` lacks."""
    if recipe.rows is not None and makes(recipe, "groups") and _reads_more(recipe.rows):
        says = "rows.name=%s may leave out episodes by what `perturn credit` does not read; none are left out here"
        _logger.warning(says, name_of(table("rows"), type(recipe.rows)))


class _Weigher:
    """Applies a credit to a run's stored episodes, iteration by iteration, and carries learned states over."""

    def __init__(self, paths: RunPaths, recipe: Recipe, credit: Credit, reference: str | None) -> None:
        self.credit = credit
        self._paths, self._recipe, self._reference = paths, recipe, reference
        self._states: dict[str, State] = {}

    def computed(self, stage: Stage, episodes: Sequence[Trajectory]) -> dict[str, Computed]:
        """Compute the quantities that the credit needs for the episodes of an iteration."""
        compares = len(policies_of(self.credit.needs)) > 1  # such as a policy and its reference
        source = RunSource(
            self._paths,
            self._recipe,
            stage.iteration,
            reference=self._reference or (None if compares else stage.policy),
            acted=self._reference or stage.policy,
            start=self._reference,
            states=self._states,
        )
        found = compute(self.credit.needs, episodes, source)
        self._states = states_of(found)
        return found

    def weigh(
        self, stage: Stage, drop_equal_outcomes: bool = False
    ) -> tuple[list[Trajectory], dict[str, Computed], list[CreditRow]]:
        """Return an iteration's episodes, the quantities of the episodes that count, and the rows of all episodes."""
        paths, recipe = self._paths, self._recipe
        played = list(read_trajectories(paths.trajectories(stage.name)))
        members = members_of(self.credit, played, paths, recipe, stage.mark)
        episodes = measured(recipe, members, sense_in(self.credit.needs))
        computed = self.computed(stage, counted(episodes, failures_of(recipe)))
        rows = credit_groups(
            episodes,
            self.credit,
            given(computed),
            drop_equal_outcomes=drop_equal_outcomes or _drops_equal(recipe),
            filtered=_filtered(recipe, episodes),
            failures=failures_of(recipe),
        )
        return episodes, computed, rows


def _drops_equal(recipe: Recipe) -> bool:
    """Return whether the run leaves out groups whose outcomes are equal."""
    return recipe.rows is not None and recipe.rows.traits.drop_equal_outcomes


def _filtered(recipe: Recipe, episodes: Sequence[Trajectory]) -> Collection[tuple[str, int]]:
    """Return the keys of the episodes that the run's row maker leaves out, such as by their signals.

    None are left out if the row maker makes no groups, or reads quantities or expert episodes.
    """
    if recipe.rows is None or not makes(recipe, "groups") or _reads_more(recipe.rows):
        return ()
    return recipe.rows(RowInputs(explored=episodes)).filtered


def _reads_more(rows: RowMaker) -> bool:
    """Return whether a row maker reads more than explored episodes."""
    return bool(rows.needs) or rows.traits.expert


def weigh_stored(
    paths: RunPaths, recipe: Recipe, section: Mapping[str, Any], iteration: int
) -> tuple[Credit, list[Trajectory], list[CreditRow]]:
    """Compute the turn weights of an iteration's explored episodes with any credit. Nothing is written.

    Args:
        paths: Paths of the run.
        recipe: Recipe of the run.
        section: Settings of the credit, as in the section `credit` of a recipe.
        iteration: Number of the iteration, from 1.

    Returns:
        The credit, the weighed episodes, and one row for each episode.

    Raises:
        PerturnError: If the credit cannot weigh the episodes.
    """
    credit = _make_credit(section, recipe)
    explored = [stage for stage in explored_stages(paths, recipe) if stage.iteration <= iteration]
    _check_stored(credit, recipe, explored, None)
    weigher = _Weigher(paths, recipe, credit, None)
    if not carried_by(credit.needs):
        explored = explored[-1:]
    for stage in explored:
        episodes, _, rows = weigher.weigh(stage)
    return credit, episodes, rows


def _make_credit(section: Mapping[str, Any], recipe: Recipe) -> Credit:
    """Create the credit from its section, and check it."""
    credit = make_credit(section)
    wanted(credit.needs, f"credit {section['name']!r}")
    check_prover(recipe, str(section["name"]), credit)
    return credit


def _check_stored(credit: Credit, recipe: Recipe, explored: Sequence[Stage], reference: str | None) -> None:
    """Reject a credit whose quantities cannot be computed from stored episodes."""
    if sense_in(credit.needs):
        reader = f"credit {type(credit).__name__} reads how far an episode is from a success"
        with closing_world(world_maker(recipe)()) as env:
            check_abilities(env, "remaining", reader=reader, otherwise="take a credit that does not")
    references = {
        stage.iteration: reference or reference_of_iteration(recipe, stage.iteration) for stage in explored
    }
    planned = Planned(
        f"credit {type(credit).__name__}",
        recipe,
        lambda: answer_form(recipe),
        references,
        stored=True,
    )
    check_needs(credit.needs, planned)


def _section(words: Sequence[str]) -> dict[str, Any]:
    """Return the section `credit` from the overrides of a command."""
    data: dict[str, Any] = {}
    apply_overrides(data, words)
    section = data.pop("credit", None)
    found: dict[str, Any] = section if isinstance(section, dict) else {}
    must = "be credit.name=NAME and settings of that credit, such as credit.gamma=0.9"
    check_fit(not data and found.get("name"), "what follows the run", must, " ".join(words))
    return found


def _named(section: Mapping[str, Any], name: str | None, against: str | None) -> str:
    """Return the name for the files of the weights."""
    label = _label(section) if name is None else name
    fits = re.fullmatch(r"[\w.,=+-]*[\w+]", label) and not re.search(r"-\d{3,}$", label)
    must = "be usable as a file's name, and not end like the mark of an iteration, -001"
    check_fit(fits, "--as", must, label)
    must = f"differ from the name of the weights that --against {against} compares with"
    check_fit(label != against, "--as", must, label, "Give another name, such as --as again.")
    return label


def _label(section: Mapping[str, Any]) -> str:
    """Return the name of a credit's files."""
    return str(section["name"]).rpartition(":")[2]


def explored_stages(paths: RunPaths, recipe: Recipe) -> list[Stage]:
    """Return the finished exploration stages.

    Raises:
        RunError: If no exploration is done, or a file of an exploration is damaged.
    """
    manifest = read_manifest(paths.folder)
    done = done_stages(manifest)
    found = [stage for stage in stages(recipe) if stage.name == f"explore{stage.mark}" and stage.name in done]
    if not found:
        raise RunError(
            f"{paths.folder} has explored nothing yet; run: perturn collect {quote(str(paths.folder))}"
        )
    names = {paths.name(paths.trajectories(stage.name)) for stage in found}
    seals = {file: one for file, one in manifest["files"].items() if file in names}
    refuse_damage(paths.folder, seals)
    return found


def _write_beside(paths: RunPaths, file: Path, rows: list[CreditRow]) -> None:
    """Write a file of weights, unless a stage of the run has made it."""
    if read_manifest(paths.folder)["files"].get(paths.name(file), {}).get("stage") is None:
        write_credits(file, rows)
    elif read_credits(file) != rows:
        raise RunError(
            f"{file} is the run's own and holds other weights; give these another name, such as --as again."
        )


def _against(
    paths: RunPaths, recipe: Recipe, explored: Sequence[Stage], name: str, reference: str | None
) -> _Weigher | None:
    """Return a weigher for the credit to compare with; None if its weights are stored for all iterations."""
    if all(paths.credit(name, stage.mark).is_file() for stage in explored):
        return None
    return _Weigher(paths, recipe, _make_credit({"name": name}, recipe), reference)


def _other(paths: RunPaths, stage: Stage, name: str, weigher: _Weigher | None) -> list[CreditRow]:
    """Return the rows of the credit to compare with: stored rows, or else rows computed for its group members.

    A credit with a learned state must be computed for all iterations, even if rows are stored.
    """
    file = paths.credit(name, stage.mark)
    if weigher is None or (file.is_file() and not carried_by(weigher.credit.needs)):
        return read_credits(file)
    return weigher.weigh(stage)[2]
