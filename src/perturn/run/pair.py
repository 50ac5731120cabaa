"""Make preference pairs from a run's trajectories, or take the user's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perturn.data.pairs import (
    pair_with_corrected,
    pair_with_expert,
    pair_within_branches,
    pair_within_groups,
)
from perturn.data.rows import rows_of
from perturn.data.steps import pair_with_expert_steps
from perturn.data.store import read_trajectories, write_pairs
from perturn.data.tree import pair_within_trees
from perturn.data.turns import pair_right_with_wrong, pair_where_worth_drops
from perturn.errors import RunError
from perturn.io.reading import user_path
from perturn.run.branch import played_on, walked
from perturn.run.correct import corrections
from perturn.run.measure import measured, measured_pairs
from perturn.run.progress import mention
from perturn.run.session import Session, engine_settings
from perturn.run.signals import left_out
from perturn.settings.sections import Pair
from perturn.settings.stages import Stage
from perturn.table import locate
from perturn.types import PreferencePair, Trajectory, came_back, failed, succeeded


def make_pairs(session: Session, stage: Stage) -> None:
    """Pair the expert's trajectories, his steps or corrections with the policy's own, or its best with its worst.

    Raises:
        RunError: If no pair is left, and none is hoped for in a later iteration.
    """
    run, settings = session.run, session.recipe.pair
    assert settings is not None
    played = _explored(session, stage)
    with run.stage(stage.name, run.paths.pairs(stage.mark)) as counts:
        filtered = left_out(played, settings.signals)
        chosen = [one for one in played if one.key not in filtered]
        pairs, reasons = _PAIRED[settings.within](session, stage, settings, chosen)
        if settings.signals:
            reasons["filtered"] = len(filtered)
        if settings.within in _SHARE_TURNS and engine_settings(session.recipe).traits.serves_checkpoints:
            each = 1 if settings.by == "drop" else _SHARE_TURNS[settings.within]
            pairs = _that_part(session, pairs, reasons, played, each=each)
        counts |= reasons
        outcomes = ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count)
        counted = (
            "episodes" if settings.within in ("expert", "group") else "counts"
        )  # of branches, each once a side
        mention(f"pairs: {len(pairs)}; {counted}: {outcomes}")
        if not pairs and stage.iteration == session.recipe.iterations == 1:
            first = "lower pair.threshold" if settings.by != "progress" else "take more branch.samples"
            first += ", leave out fewer by pair.signals" if settings.signals else ""
            raise RunError(
                f"no pair is left of {len(played)} explored trajectories; {first}, explore more tasks, or take a "
                "higher temperature."
            )
        write_pairs(run.paths.pairs(stage.mark), pairs)


def prefer(session: Session, stage: Stage) -> None:
    """Pair an iteration's episodes with each other by how they ended, for its reward model; there may be no pair."""
    run, settings = session.run, session.recipe.reward
    assert settings is not None
    file, played = run.paths.preferences(stage.mark), _explored(session, stage)
    with run.stage(stage.name, file) as counts:
        fitting, too_long = _fitting(session, played)
        pairs, reasons = pair_within_groups(fitting, settings.threshold, per_group=settings.per_group)
        reasons["too_long"] = too_long
        counts |= reasons
        mention("in pairs:", ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count))
        write_pairs(file, measured_pairs(session.recipe, pairs))


def _explored(session: Session, stage: Stage) -> list[Trajectory]:
    """The explored episodes of an iteration, sorted: they are stored as they end, which depends on timing."""
    found = read_trajectories(session.run.paths.trajectories(f"explore{stage.mark}"))
    return sorted(found, key=lambda one: one.key)


_Paired = tuple[list[PreferencePair], Counter[str]]


def _with_expert(session: Session, stage: Stage, settings: Pair, played: Sequence[Trajectory]) -> _Paired:
    stored = read_trajectories(session.run.paths.trajectories("expert"))
    experts = [one for one in stored if succeeded(one)]
    extra = settings.max_extra_turns
    pairs, reasons = pair_with_expert(experts, played, settings.threshold, max_extra_turns=extra)
    return measured_pairs(session.recipe, pairs), reasons


def _with_expert_steps(
    session: Session, stage: Stage, settings: Pair, played: Sequence[Trajectory]
) -> _Paired:
    experts = walked(session, {one.task.id for one in played})
    branches = read_trajectories(session.run.paths.trajectories(f"branch{stage.mark}"))
    extra = settings.max_extra_turns
    pairs, reasons = pair_with_expert_steps(
        experts, played, branches, settings.threshold, max_extra_turns=extra
    )
    # Cut where both sides are still the same, they would be no pair.
    own = [pair.rejected for pair in pairs if pair.rejected.origin is not None]
    cut = locate("perturn.run.groups:too_long")(session.recipe, own)
    reasons["steps_too_long"] = len(cut)
    reasons["steps_kept"] -= len(cut)
    return measured_pairs(session.recipe, [pair for pair in pairs if pair.rejected.key not in cut]), reasons


def _within_groups(session: Session, stage: Stage, settings: Pair, played: Sequence[Trajectory]) -> _Paired:
    fitting, too_long = _fitting(session, played)
    pairs, reasons = pair_within_groups(fitting, settings.threshold, per_group=settings.per_group)
    reasons["too_long"] = too_long
    return measured_pairs(session.recipe, pairs), reasons


def _within_branches(session: Session, stage: Stage, settings: Pair, played: Sequence[Trajectory]) -> _Paired:
    begun = played_on(session, played)
    fitting, _ = _fitting(session, begun)
    kept = {one.key for one in fitting}
    branches = list(read_trajectories(session.run.paths.trajectories(f"branch{stage.mark}")))
    of_fitting = [one for one in branches if (one.task.id, one.origin) in kept]
    pairs, reasons = _BRANCHED[settings.by](session, settings, fitting, of_fitting)
    # An explored episode has a step, and is in a group, for each turn that it was played on from; so have those that
    # do not fit.
    turns = {(one.task.id, one.origin, one.taken_over) for one in branches}
    unit, asked = (
        ("steps", len(turns)) if settings.by == "drop" else ("memberships", len(branches) + len(turns))
    )
    reasons["too_long"] = asked - reasons.total()
    reasons[unit] = asked
    return pairs, reasons


def _by_outcome(
    session: Session, settings: Pair, begun: Sequence[Trajectory], branches: Sequence[Trajectory]
) -> _Paired:
    pairs, reasons = pair_within_branches(
        begun, branches, settings.threshold, per_group=settings.per_group, one_turn=settings.one_turn
    )
    return measured_pairs(session.recipe, pairs), reasons


def _by_progress(
    session: Session, settings: Pair, begun: Sequence[Trajectory], branches: Sequence[Trajectory]
) -> _Paired:
    # A world that did not come back does not do so now.
    ended = measured(session.recipe, [one for one in branches if not failed(one)])
    broken = [one for one in branches if failed(one)]
    return pair_right_with_wrong(
        measured(session.recipe, begun),
        [*ended, *broken],
        per_group=settings.per_group,
        one_turn=settings.one_turn,
    )


def _by_drop(
    session: Session, settings: Pair, begun: Sequence[Trajectory], branches: Sequence[Trajectory]
) -> _Paired:
    pairs, reasons = pair_where_worth_drops(begun, branches, settings.threshold, one_turn=settings.one_turn)
    return measured_pairs(session.recipe, pairs), reasons


_BRANCHED = {"outcome": _by_outcome, "progress": _by_progress, "drop": _by_drop}
"""`pair.by` -> how episodes and those that were played on from them become pairs."""


def _within_trees(session: Session, stage: Stage, settings: Pair, played: Sequence[Trajectory]) -> _Paired:
    fitting, _ = _fitting(session, played)
    kept = {one.key for one in fitting}
    branches = read_trajectories(session.run.paths.trajectories(f"branch{stage.mark}"))
    of_fitting = [one for one in branches if (one.task.id, one.origin) in kept and came_back(one)]
    pairs, reasons = pair_within_trees(fitting, of_fitting, settings.threshold)
    reasons["too_long"], reasons["nodes"] = 0, reasons.total()
    return measured_pairs(session.recipe, pairs), reasons


def _fitting(session: Session, played: Sequence[Trajectory]) -> tuple[list[Trajectory], int]:
    """The trajectories whose first turn fits the length limit of training, and how many do not."""
    cut = locate("perturn.run.groups:too_long")(session.recipe, played)
    return [one for one in played if one.key not in cut], len(cut)


def _that_part(
    session: Session,
    pairs: Sequence[PreferencePair],
    reasons: Counter[str],
    played: Sequence[Trajectory],
    each: int,
) -> list[PreferencePair]:
    """The pairs that part within the length limit of training; others, which count `each`, are counted as too long."""
    alike = locate("perturn.run.groups:alike_within_limit")(session.recipe, pairs)
    lost = [pair.rejected for pair, is_alike in zip(pairs, alike, strict=True) if is_alike]
    if not lost:
        return list(pairs)
    reasons["kept"] -= each * len(lost)
    reasons["too_long"] += each * len(lost)
    if "cut" in reasons:  # of those that are kept
        whole = {one.key: len(one.turns) for one in played}
        reasons["cut"] -= sum(len(one.turns) < whole[one.key] for one in lost)
    return [pair for pair, is_alike in zip(pairs, alike, strict=True) if not is_alike]


def _with_corrected(session: Session, stage: Stage, settings: Pair, played: Sequence[Trajectory]) -> _Paired:
    explored = measured(session.recipe, played)
    corrected = measured(session.recipe, corrections(session.recipe, explored))
    return pair_with_corrected(
        explored,
        corrected,
        settings.threshold,
        max_extra_turns=settings.max_extra_turns,
        one_turn=settings.one_turn,
    )


_PAIRED = {
    "expert": _with_expert,
    "step": _with_expert_steps,
    "group": _within_groups,
    "branch": _within_branches,
    "tree": _within_trees,
    "correction": _with_corrected,
}
"""`pair.within` -> how explored trajectories become pairs, measured if the recipe says so, and counts of them."""


_SHARE_TURNS = {"branch": 2, "tree": 1, "correction": 1}
"""`pair.within` whose sides begin with the same turns -> trajectories, or nodes, that a pair counts for."""


def bring_pairs(session: Session, stage: Stage) -> None:
    """Take the pairs of the user's file, ours or TRL's.

    Raises:
        DataError: If a row is malformed, or no pair.
    """
    assert session.recipe.pair is not None
    assert session.recipe.pair.file is not None
    source = user_path(session.recipe.pair.file, "pair.file")
    target = session.run.paths.pairs(stage.mark)
    with session.run.stage(stage.name, target) as counts:
        pairs = list(rows_of(source, PreferencePair))
        counts["kept"] = write_pairs(target, measured_pairs(session.recipe, pairs))
