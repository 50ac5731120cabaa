"""Rows of training without a run, from episodes that are objects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perturn.api.arguments import trajectories_in
from perturn.api.weighing import weigh
from perturn.config.compatibility import providers
from perturn.config.parsing import build_entry, section_of
from perturn.config.row_maker_settings import ROWS, Made, RowInputs, RowMaker, RowTraits
from perturn.config.sections import Section
from perturn.credit import Credit
from perturn.data.group_account import ledger
from perturn.errors import check_none
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
    **weighing: Any,
) -> list[Any]:
    """Make rows of training from episodes, by any entry of `ROWS` that needs no run.

    Args:
        explored: The policy's episodes, as `collect` returns them.
        rows: A row maker, the name of one, or a section `rows`.
        experts: The expert's episodes, for a row maker that reads them, or whose branches resume them.
        branches: Episodes that resume others; None: those among `explored` that resume one of `explored` or `experts`.
        credit: Weighs the rows `groups`: a credit, the name of one, or a section `credit`.
        seed: Of draws.
        weighing: Further arguments of `weigh`, for the rows `groups`.

    Returns:
        Pairs, or trajectories with weights; a warning says why there is none.

    Raises:
        ConfigError: If there is no such row maker, a setting is wrong, something is missing, or it needs a run.
    """
    own = not isinstance(rows, str | Mapping | type) and "traits" in dir(rows)
    maker: Any = rows if own else build_entry(ROWS, section_of(rows, "rows"), "rows")
    traits, name = maker.traits, type(maker).__name__
    grouped = traits.makes == "groups"
    episodes = sorted(trajectories_in(explored, "explored"), key=lambda one: one.key)
    experts = [one for one in trajectories_in(experts, "experts") if succeeded(one)]
    if branches is None:
        episodes, branches = _without_branches(episodes, experts)
    branches = trajectories_in(branches, "branches")
    check_none(_weighing_faults(maker, credit, weighing))
    check_none(_faults(maker, episodes, experts, branches))
    of_expert = "expert-branches" in traits.branches and bool(experts)
    made = maker(
        RowInputs(
            explored=episodes,
            experts=experts,
            taught=experts,
            branches=branches if traits.branches or grouped else (),
            begun=[one for one in (experts if of_expert else episodes) if not failed(one)],
            given=[] if traits.source is None else list(_rows_of(traits)),
            seed=seed,
        )
    )
    found = list(made.rows) if not grouped else _trained(made, traits, credit, weighing)
    if not found:
        _logger.warning(
            "%s: of %d episodes, none became a row: %s", name, len(episodes), made.lacks or dict(made.counts)
        )
    return found


def _without_branches(
    episodes: Sequence[Trajectory], experts: Sequence[Trajectory]
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the episodes that resume none of the given episodes, and the episodes that do."""
    begun = {one.key for one in (*episodes, *experts)}
    resumes = [one.origin is not None and (one.task.id, one.origin) in begun for one in episodes]
    pairs = list(zip(episodes, resumes, strict=True))
    return [one for one, own in pairs if not own], [one for one, own in pairs if own]


def _rows_of(traits: RowTraits) -> Iterable[Any]:
    """Return rows of the user's own classes."""
    assert traits.source is not None
    return rows_of(user_path(traits.source, "rows.path"), ROWS_OF[traits.makes])


def _faults(
    maker: RowMaker,
    explored: Sequence[Trajectory],
    experts: Sequence[Trajectory],
    branches: Sequence[Trajectory],
) -> Iterator[str]:
    """Yield why a row maker needs a run, or which inputs are missing."""
    traits, name = maker.traits, type(maker).__name__
    if traits.corrects:
        yield (
            f"rows {name} has a world's expert finish episodes, which only a run does; use `perturn pair`."
        )
    needs = {name_of(need) for need in maker.needs}
    measured = all(turn.remaining is not None for one in (*explored, *branches) for turn in one.turns)
    if needs - {Distance.name} or (needs and not measured):
        yield (
            f"rows {name} needs {', '.join(sorted(needs))}, which only a run computes; use `perturn pair`."
        )
    if traits.expert and not experts:
        yield (
            f"rows {name} reads the expert's successes, and there is none; give experts=collect('expert', ...)."
        )
    if traits.branches and not branches:
        yield (
            f"rows {name} reads episodes that resume others, and there is none; collect with explore=, such as "
            f"{' or '.join(map(repr, providers(*sorted(traits.branches))))}."
        )
    if traits.needs_history and any(one.history is not None for one in (*explored, *experts)):
        yield (
            f"rows {name} puts two episodes into one conversation, of which a policy must see all; play by rules with "
            "history=None."
        )


def _weighing_faults(maker: RowMaker, credit: Any, weighing: Mapping[str, Any]) -> Iterator[str]:
    """Yield inputs that are missing for weighing rows of groups, and arguments that nothing would read."""
    name = type(maker).__name__
    if maker.traits.makes != "groups":
        if unread := [*(["credit"] if credit is not None else []), *weighing]:
            yield f"rows {name} are weighed in training, so nothing reads {', '.join(unread)}; leave out."
        return
    if "failed" in weighing:
        yield (
            f"failed is a setting of rows {name}; give it in the section, as rows={{'name': ..., 'failed': ...}}."
        )
    if credit is None:
        yield f"rows {name} are weighed by a credit; give credit=, such as credit='rloo', or call weigh."


def _trained(
    made: Made, traits: RowTraits, credit: Any, weighing: dict[str, Any]
) -> list[WeightedTrajectory]:
    """Return the members of groups that are trained, with their weights, as a run accounts for them."""
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
    flat = (row for each in rows for row in each)
    return [row for row, noted in zip(flat, credited, strict=True) if noted.bin == "trained"]
