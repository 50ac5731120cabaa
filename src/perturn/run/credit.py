"""Credit the stored groups of a run: with the credit of its recipe, or again with any other."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

from perturn.credit import Credit
from perturn.data.groups import CreditRow, groups_of, ledger, read_credits, write_credits
from perturn.data.paths import RunPaths, begun
from perturn.data.run_folder import resolve_recipe
from perturn.data.seals import read_manifest, refuse_damage
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.policy.credits import OF_GROUPS, make_credit
from perturn.policy.sampled import Needed, weigh_groups
from perturn.policy.values import explained_variance
from perturn.report.credits import compare_credits, credit_summary
from perturn.run.measure import measured
from perturn.run.members import members_of
from perturn.run.needed import check_prover
from perturn.run.quantities import compute_needed
from perturn.run.readings import scores_of
from perturn.settings.parsing import apply_overrides
from perturn.settings.recipe import Recipe
from perturn.settings.stages import Stage, stages
from perturn.types import Trajectory

_COMPUTED = OF_GROUPS | {"reference"}
"""Quantities that can be computed for stored episodes."""


def credit_groups(
    trajectories: Sequence[Trajectory],
    credit: Credit,
    needed: Needed | None = None,
    *,
    drop_equal_outcomes: bool = False,
    too_long: Collection[tuple[str, int]] = (),
    filtered: Collection[tuple[str, int]] = (),
) -> list[CreditRow]:
    """Weigh the turns of an iteration's episodes, and say where each ends.

    Args:
        trajectories: Every episode that was asked for, in any order.
        credit: What weighs.
        needed: What it needs, by keyword, one entry a trajectory.
        drop_equal_outcomes: As `ledger` has it.
        too_long: As `ledger` has it.
        filtered: As `ledger` has it.

    Returns:
        One row an episode, by task and sample.

    Raises:
        ConfigError: If the credit raises, or does not give each turn a finite weight.
    """
    position = {one.key: index for index, one in enumerate(trajectories)}
    groups = groups_of(trajectories)
    order = [[position[one.key] for one in group] for group in groups]
    weights = weigh_groups(trajectories, order, credit, needed or {})
    listed = [[weights[index].tolist() for index in members] for members in order]
    return ledger(
        groups, listed, drop_equal_outcomes=drop_equal_outcomes, too_long=too_long, filtered=filtered
    )


def explained(credit: Any, trajectories: Sequence[Trajectory], needed: Needed) -> dict[str, float | None]:
    """`explained_variance` of the values that a credit was given, or of sums of contributions, if it was given any."""
    if "values" in needed:
        values = needed["values"]
        tokens = [[len(turn) for turn in of_one] for of_one in values]
        return {"explained_variance": explained_variance(values, credit.value_targets(trajectories, tokens))}
    if "contributions" in needed:
        pairs = zip(needed["contributions"], scores_of(trajectories, credit), strict=True)
        played = [(fsum(shares.own), score) for shares, score in pairs if shares.own]
        sums, scores = ([[[pair[side]]] for pair in played] for side in (0, 1))
        return {"explained_variance": explained_variance(sums, scores)}
    return {}


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
    """Credit all episodes that a run has explored again, beside its own credit, and change nothing else of it.

    Args:
        folder: The run folder; the run need not be finished.
        words: `credit.name=NAME` or `credit.name=MODULE:CLASS`, and its settings, such as `credit.gamma=0.9`.
        against: Another credit to compare with: one that the run has weights of, or a name of CREDITS.
        name: How the weights are named; None: as the credit.
        reference: Policy of the run that a credit may read, for values too; None: the one that explored.
        drop_equal_outcomes: As `ledger` has it.
        writes: Whether the weights are written down.

    Returns:
        JSON data: `credit`, and for each iteration its file, counts and weights, and the comparison.

    Raises:
        PerturnError: If the run has explored nothing, or the credit cannot weigh it.
    """
    paths, recipe = begun(folder), resolve_recipe(folder)
    section = _section(words)
    credit = _make_credit(section, recipe)
    label = _label(section) if name is None else name
    if not re.fullmatch(r"[\w.,=+-]*[\w+]", label):
        raise ConfigError(f"--as must be usable as a file's name, got {label!r:.80}.")
    if against is not None and _label({"name": against}) == label:
        raise ConfigError(
            f"--against {against} would compare these weights with themselves; give them another name, such as --as "
            "again."
        )
    found, explored = [], _explored(paths, recipe)
    other = None if against is None else _against(paths, recipe, explored, against)
    for stage in explored:
        played = list(read_trajectories(paths.trajectories(stage.name)))
        episodes = measured(recipe, members_of(credit, played, paths, recipe, stage.mark))
        policy = reference or stage.policy
        needed = compute_needed(
            credit, episodes, paths, recipe, reference=policy, acted=policy, mark=stage.mark
        )
        rows = credit_groups(episodes, credit, needed, drop_equal_outcomes=drop_equal_outcomes)
        file = paths.credit(label, stage.mark)
        if writes:
            _write_beside(paths, file, rows)
        one = {"iteration": stage.iteration, "file": paths.name(file), **credit_summary(episodes, rows)}
        one |= explained(credit, episodes, needed)
        if against is not None:
            theirs = _other(paths, recipe, policy, stage.mark, against, other, episodes)
            one["against"] = compare_credits(episodes, rows, theirs).to_dict()
        found.append(one)
    return {"run": str(folder), "credit": section, "against": against, "iterations": found}


def _make_credit(section: Mapping[str, Any], recipe: Recipe) -> Credit:
    """Section `credit` -> the credit.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, it needs what nothing computes, or it would take
            a prover's branches for those of the policy that explored.
    """
    credit = make_credit(section)
    missing = sorted(getattr(credit, "needs", frozenset()) - _COMPUTED)
    if missing:
        raise ConfigError(
            f"credit {section['name']!r} reads {', '.join(missing)}, which nothing computes for stored episodes; take "
            "a credit without, such as rloo."
        )
    check_prover(recipe, str(section["name"]), credit)
    return credit


def _section(words: Sequence[str]) -> dict[str, Any]:
    """The section `credit` of the command's words."""
    data: dict[str, Any] = {}
    apply_overrides(data, words)
    section = data.pop("credit", None)
    if data or not isinstance(section, dict) or not section.get("name"):
        got = ", ".join(words) or "none"
        raise ConfigError(
            f"expected credit.name=NAME and its settings, such as credit.gamma=0.9, got {got:.200}."
        )
    return section


def _label(section: Mapping[str, Any]) -> str:
    """Name of a credit's files."""
    return str(section["name"]).rpartition(":")[2]


def _explored(paths: RunPaths, recipe: Recipe) -> list[Stage]:
    """The explorations that are done.

    Raises:
        RunError: If there is none, or an episode file is damaged.
    """
    manifest = read_manifest(paths.folder) or {}
    done = {name for name, note in manifest.get("stages", {}).items() if note.get("done")}
    found = [stage for stage in stages(recipe) if stage.name == f"explore{stage.mark}" and stage.name in done]
    if not found:
        raise RunError(f"{paths.folder} has explored nothing yet; run: perturn collect {paths.folder}")
    names = {paths.name(paths.trajectories(stage.name)) for stage in found}
    seals = {file: one for file, one in manifest.get("files", {}).items() if file in names}
    refuse_damage(paths.folder, seals)
    return found


def _write_beside(paths: RunPaths, file: Path, rows: list[CreditRow]) -> None:
    """Write a file of credits that no stage made.

    Raises:
        RunError: If a stage made one of that name, and it holds other weights.
    """
    manifest = read_manifest(paths.folder) or {}
    if manifest.get("files", {}).get(paths.name(file), {}).get("stage") is None:
        write_credits(file, rows)
    elif read_credits(file) != rows:
        raise RunError(
            f"{file} is the run's own and holds other weights; give these another name, such as --as again."
        )


def _against(paths: RunPaths, recipe: Recipe, explored: Sequence[Stage], name: str) -> Credit | None:
    """The credit to compare with, by its defaults; None where its weights of every iteration are there."""
    if all(paths.credit(_label({"name": name}), stage.mark).is_file() for stage in explored):
        return None
    return _make_credit({"name": name}, recipe)


def _other(
    paths: RunPaths,
    recipe: Recipe,
    policy: str,
    mark: str,
    name: str,
    credit: Credit | None,
    episodes: Sequence[Trajectory],
) -> list[CreditRow]:
    """Rows of the credit to compare with: those that are there, else as the credit gives them."""
    file = paths.credit(_label({"name": name}), mark)
    if credit is None or file.is_file():
        return read_credits(file)
    needed = compute_needed(credit, episodes, paths, recipe, reference=policy, acted=policy, mark=mark)
    return credit_groups(episodes, credit, needed)
