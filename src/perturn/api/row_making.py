"""Make training rows from episodes without a run folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perturn.api.arguments import trajectories_in, without_branches
from perturn.api.weighing import chosen_credit, weigh
from perturn.config.compatibility import providers
from perturn.config.parsing import build_entry, section_of
from perturn.config.row_maker_settings import (
    ROWS,
    Made,
    RowInputs,
    RowMaker,
    RowTraits,
    check_row_maker,
    rows_made,
)
from perturn.config.sections import Section
from perturn.credit import Credit
from perturn.data.group_account import counts_of, ledger
from perturn.errors import check_belongs, check_fit, check_provided, required
from perturn.formats.read_rows import rows_of
from perturn.group import groups_of
from perturn.io.read_input import user_path
from perturn.needs import Distance, name_of
from perturn.run.stages.row_stage import ROWS_OF
from perturn.types import Trajectory, WeightedTrajectory, failed, succeeded

_logger = logging.getLogger(__name__)


def make_rows(
    explored: Iterable[Trajectory],
    rows: str | Section | RowMaker = "expert-pairs",
    *,
    experts: Iterable[Trajectory] = (),
    branches: Iterable[Trajectory] | None = None,
    credit: str | Section | Credit | None = None,
    seed: int = 0,
    keep_no_spread: bool = False,
    **weighing: Any,
) -> list[Any]:
    """Make training rows from episodes, with a row maker of `ROWS` that needs no run folder.

    Args:
        explored: The policy's episodes, as `collect` returns them.
        rows: Row maker, name of a row maker, or section `rows`.
        experts: The expert's episodes, for a row maker that reads them or their branches.
        branches: Episodes that resume other episodes. None: the episodes of `explored` that resume another episode of
            `explored` or `experts`. If the row maker or the credit does not read them, a logged warning counts them.
        credit: Credit that weighs rows of groups: a credit, its name, or a section `credit`.
        seed: Seed of random choices.
        keep_no_spread: Whether to keep groups whose weights are all 0. They count only in a KL term of the loss.
        weighing: Further arguments of `weigh`, for rows of groups.

    Returns:
        Pairs, or trajectories with weights. A logged line says what became of the episodes; it is a warning if there
        are none.

    Raises:
        ConfigError: If the row maker is unknown or needs a run folder, a setting is wrong, or an input is missing.
    """
    maker = _maker(rows)
    traits = maker.traits
    episodes = sorted(trajectories_in(explored, "explored"), key=lambda one: one.key)
    experts = [one for one in trajectories_in(experts, "experts") if succeeded(one)]
    episodes, own = without_branches(episodes, experts) if branches is None else (episodes, branches)
    branches = trajectories_in(own, "branches")
    _check_weighing(maker, credit, weighing | ({"keep_no_spread": True} if keep_no_spread else {}))
    _check_episodes(maker, episodes, experts, branches)
    weigher = chosen_credit(credit) if traits.makes == "groups" else None
    read = branches if _reads_branches(maker, weigher, len(branches)) else []
    of_expert = "expert-branches" in traits.branches and bool(experts)
    made = rows_made(
        maker,
        RowInputs(
            explored=episodes,
            experts=experts,
            sft_episodes=experts,
            branches=read,
            begun=[one for one in (experts if of_expert else episodes) if not failed(one)],
            given=[] if traits.source is None else list(_rows_of(traits)),
            seed=seed,
        ),
    )
    found, counts = list(made.rows), dict(made.counts)
    if weigher is not None:
        found, counts = _trained(made, traits, keep_no_spread, weigher, weighing)
    account = _account(counts | {"ignored": len(branches) - len(read)}, made.lacks)
    _log_rows(maker, len(found), len(episodes) + len(branches), account)
    return found


def _reads_branches(maker: RowMaker, weigher: Credit | None, branches: int) -> bool:
    """Return whether a row maker, or the credit of its groups, reads branches. If not, log how many are ignored."""
    reads = bool(maker.traits.branches) if weigher is None else weigher.traits.trains_branches
    if branches and not reads:
        by = "" if weigher is None else f" with credit {type(weigher).__name__}"
        said = "episodes that resume others: %d; %s%s does not read them."
        _logger.warning(said, branches, type(maker).__name__, by)
    return reads


def _log_rows(maker: RowMaker, rows: int, episodes: int, account: str) -> None:
    said = f"{type(maker).__name__}: {rows} rows from {episodes} episodes{account}"
    _logger.log(logging.INFO if rows else logging.WARNING, "%s", said)


def _account(counts: Mapping[str, int], lacks: str) -> str:
    """Return what became of the episodes, and why there are no rows to train on, as the end of a sentence."""
    parts = ", ".join(f"{key.replace('_', ' ')} {count}" for key, count in counts.items() if count)
    return (f" ({parts})" if parts else "") + (f"; {lacks}" if lacks else "")


def _maker(rows: Any) -> Any:
    """Return a row maker, given an object, its name, or a section `rows`."""
    own = not isinstance(rows, str | Mapping | type) and "traits" in dir(rows)
    maker = rows if own else build_entry(ROWS, section_of(rows, "rows"), "rows")
    check_row_maker(maker)
    return maker


def _rows_of(traits: RowTraits) -> Iterable[Any]:
    """Read the rows of a file, for a row maker that takes its rows from a file."""
    assert traits.source is not None
    return rows_of(user_path(traits.source, "rows.path"), ROWS_OF[traits.makes])


def _check_episodes(
    maker: RowMaker,
    explored: Sequence[Trajectory],
    experts: Sequence[Trajectory],
    branches: Sequence[Trajectory],
) -> None:
    """Raise `ConfigError` if a row maker needs a run folder, or if episodes that it reads are missing."""
    traits, name = maker.traits, f"rows {type(maker).__name__}"
    measured = all(turn.remaining is not None for one in (*explored, *branches) for turn in one.turns)
    needs = sorted(name_of(need) for need in maker.needs)
    needs += ["corrections by a world's expert"] if traits.corrects else []
    check_provided(name, needs, {Distance.name} if measured else (), "make_rows", "use `perturn pair`")
    if traits.expert:
        reader = f"{name} reads the expert's successes"
        required(experts or None, "experts", reader, "give experts=collect('expert', ...)")
    if traits.branches:
        explorers = " or ".join(map(repr, providers(*sorted(traits.branches))))
        reader, remedy = f"{name} reads it", f"collect with explore=, such as {explorers}"
        required(branches or None, "an episode that resumes another", reader, remedy)
    shown = next((one.history for one in (*explored, *experts) if one.history is not None), None)
    must = f"be None, since {name} puts two episodes into one conversation"
    check_fit(shown is None or not traits.needs_history, "history of the rules", must, shown)


def _check_weighing(maker: RowMaker, credit: Any, weighing: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if rows of groups have no credit, or if arguments of `weigh` would have no effect."""
    name = f"rows {type(maker).__name__}"
    if maker.traits.makes != "groups":
        given = {"credit": credit is not None} | dict.fromkeys(weighing, True)
        remedy = f"leave it out, since {name} are weighed in training"
        check_belongs(given, False, "rows of groups", remedy)
        return
    remedy = "give it in the section, as rows={'name': ..., 'failed': ...}"
    check_belongs({"failed": "failed" in weighing}, False, f"the settings of {name}", remedy)
    required(credit, "credit", f"{name} are weighed by one", "give it, such as credit='rloo', or call weigh")


def _trained(
    made: Made, traits: RowTraits, keep_no_spread: bool, credit: Credit, weighing: dict[str, Any]
) -> tuple[list[WeightedTrajectory], dict[str, int]]:
    """Weigh the groups, and return the trajectories that are trained, chosen as in a run, and the counts of bins.

    Args:
        made: Groups that the row maker returned.
        traits: Traits of the row maker.
        keep_no_spread: See `make_rows`.
        credit: The credit.
        weighing: Further arguments of `weigh`.
    """
    weighed = weigh(made.rows, credit, failed=traits.failed, **weighing)
    groups = groups_of(made.rows)
    rows = [[weighed[index] for index in group.indices] for group in groups]
    credited = ledger(
        groups,
        [[row.weight for row in each] for each in rows],
        [[row.clip for row in each] for each in rows],
        drop_equal_outcomes=traits.drop_equal_outcomes,
        filtered=made.filtered,
        failures=traits.failed,
    )
    bins = {"trained", "no_spread"} if keep_no_spread else {"trained"}
    flat = (row for each in rows for row in each)
    kept = [
        replace(row, has_spread=False) if noted.bin == "no_spread" else row
        for row, noted in zip(flat, credited, strict=True)
        if noted.bin in bins and row.trajectory.turns
    ]
    return kept, counts_of(groups, credited, traits.failed)
