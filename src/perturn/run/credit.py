"""Credit the stored groups of a run: with the credit of its recipe, or again with any other."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from perturn.credit import Credit
from perturn.credit.returns import Return
from perturn.data.groups import CreditRow, groups_of, ledger, read_credits, write_credits
from perturn.data.paths import RunPaths, begun
from perturn.data.run_folder import resolve_recipe
from perturn.data.seals import read_manifest, refuse_damage
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.policy.answers import answer_logprobs
from perturn.policy.credits import OF_GROUPS, make_credit
from perturn.policy.examples import Example, encode_example
from perturn.policy.logprobs import prepare
from perturn.policy.models import device, load_model
from perturn.policy.names import load_tokenizer
from perturn.policy.reference import compute_logprobs, frozen, turn_logprobs
from perturn.policy.sampled import Needed, weigh_groups
from perturn.policy.templates import chat_template
from perturn.policy.tokens import Renderer
from perturn.policy.values import explained_variance, turn_values
from perturn.report.credits import compare_credits, credit_summary
from perturn.run.answers import answer_form, check_gold_answers
from perturn.run.branch import branch_values
from perturn.run.matches import matches_of
from perturn.run.measure import measured
from perturn.settings.parsing import apply_overrides
from perturn.settings.recipe import Recipe
from perturn.settings.sections import TOKEN_BUDGET
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
) -> list[CreditRow]:
    """Weigh the turns of an iteration's episodes, and say where each ends.

    Args:
        trajectories: Every episode that was asked for, in any order.
        credit: What weighs.
        needed: What it needs, by keyword, one entry a trajectory.
        drop_equal_outcomes: As `ledger` has it.
        too_long: As `ledger` has it.

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
    return ledger(groups, listed, drop_equal_outcomes=drop_equal_outcomes, too_long=too_long)


def reference_of(
    trajectories: Sequence[Trajectory], model: Any, tokenizer: Any = None, template: str | None = None
) -> list[list[Tensor]]:
    """Log-probabilities of each turn's tokens under a policy, in nats `[trajectories][turns]`, each [tokens].

    Args:
        trajectories: Episodes; one without turns has nothing to compute.
        model: A name, a folder, or a transformers model.
        tokenizer: Of the model; None: that of its name.
        template: Jinja chat template to use instead of the tokenizer's own.
    """
    model, renderer = _opened(model, tokenizer, template)
    rows = _encoded(trajectories, renderer)
    with frozen(model):
        logprobs = compute_logprobs(model, [row.chosen for row in rows.values()])
    found = dict(zip(rows, logprobs, strict=True))
    return [
        turn_logprobs(replace(rows[i], reference=(found[i],)), 0) if i in rows else []
        for i in range(len(trajectories))
    ]


def values_of(
    trajectories: Sequence[Trajectory],
    credit: Any,
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[list[float]]]:
    """V at the turns of each episode, by a head on a policy's hidden states that is fitted on other episodes.

    Args:
        trajectories: Episodes, in any order, which changes nothing; one without turns has no values.
        credit: What reads them; its `value_targets` says where V is wanted, and for what return it stands.
        model: As `reference_of` has it.
        tokenizer: As `reference_of` has it.
        template: As `reference_of` has it.
        token_budget: Tokens of one pass.

    Returns:
        V, in units of reward `[trajectories][turns][tokens]`.
    """
    model, renderer = _opened(model, tokenizer, template)
    rows = _encoded(trajectories, renderer)
    order = sorted(rows, key=lambda i: trajectories[i].key)
    sequences = [rows[i].chosen for i in order]
    tokens = [[one.loss_turns.count(turn) for turn in range(one.turns)] for one in sequences]
    targets = credit.value_targets([trajectories[i] for i in order], tokens)
    with frozen(model):
        found = dict(zip(order, turn_values(model, sequences, targets, token_budget), strict=True))
    return [found.get(i, []) for i in range(len(trajectories))]


def answers_of(
    trajectories: Sequence[Trajectory],
    form: str,
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[float]]:
    """Log-probability of the gold answer around each turn of each episode; see `perturn.policy.answers`.

    Args:
        trajectories: Episodes, in any order.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        model: As `reference_of` has it.
        tokenizer: As `reference_of` has it.
        template: As `reference_of` has it.
        token_budget: Tokens of one pass.

    Returns:
        Mean over the answer's tokens, in nats `[trajectories][turns + 1]`; NaN where it is not known.
    """
    model, renderer = _opened(model, tokenizer, template)
    return answer_logprobs(model, renderer, trajectories, form, token_budget)


def _opened(model: Any, tokenizer: Any, template: str | None) -> tuple[Any, Renderer]:
    """The model, loaded and prepared, and its renderer."""
    if isinstance(model, str | Path):
        tokenizer = tokenizer or load_tokenizer(str(model))
        model = load_model(str(model)).to(device())
    renderer = Renderer(tokenizer, template)
    prepare(model)
    return model, renderer


def _encoded(trajectories: Sequence[Trajectory], renderer: Renderer) -> dict[int, Example]:
    """The trajectories that have turns as tokens, by index."""
    return {i: encode_example(one, renderer, None) for i, one in enumerate(trajectories) if one.turns}


def explained(credit: Any, trajectories: Sequence[Trajectory], needed: Needed) -> dict[str, float | None]:
    """`explained_variance` of the values that a credit was given, if it was given any."""
    if "values" not in needed:
        return {}
    values = needed["values"]
    tokens = [[len(turn) for turn in of_one] for of_one in values]
    return {"explained_variance": explained_variance(values, credit.value_targets(trajectories, tokens))}


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
    credit = _make_credit(section)
    label = _label(section) if name is None else name
    if not re.fullmatch(r"[\w.,=+-]*[\w+]", label):
        raise ConfigError(f"--as must be usable as a file's name, got {label!r:.80}.")
    found = []
    for stage in _explored(paths, recipe):
        episodes = measured(recipe, read_trajectories(paths.trajectories(stage.name)))
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
            other = _other(paths, recipe, policy, stage.mark, against, episodes)
            one["against"] = compare_credits(episodes, rows, other).to_dict()
        found.append(one)
    return {"run": str(folder), "credit": section, "against": against, "iterations": found}


def _make_credit(section: Mapping[str, Any]) -> Credit:
    """Section `credit` -> the credit.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, or it needs what nothing computes.
    """
    credit = make_credit(section)
    missing = sorted(getattr(credit, "needs", frozenset()) - _COMPUTED)
    if missing:
        raise ConfigError(
            f"credit {section['name']!r} reads {', '.join(missing)}, which nothing computes for stored episodes; take "
            "a credit without, such as rloo."
        )
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


def compute_needed(
    credit: Credit,
    episodes: Sequence[Trajectory],
    paths: RunPaths,
    recipe: Recipe,
    *,
    reference: str,
    acted: str,
    mark: str = "",
) -> Needed:
    """Quantities that a credit reads of policies and the world of the run.

    Args:
        credit: What reads them.
        episodes: What it weighs.
        paths: Of the run.
        recipe: Of the run.
        reference: Policy whose log-probabilities it may read.
        acted: Policy on whose hidden states values are fitted, and that is asked for the gold answer.
        mark: Of the iteration whose branches it may read.

    Raises:
        PerturnError: If the policy that it reads is not there, no episode was played on, the world has no gold calls to
            match, the tasks have no gold answer, or the environment does not say how one is given.
    """
    found: dict[str, Sequence[Any]] = {}
    template = chat_template(recipe.model)
    budget = recipe.align.token_budget if recipe.align else TOKEN_BUDGET
    if "reference" in credit.needs:
        found["reference"] = reference_of(episodes, _policy(paths, recipe, reference), template=template)
    if "values" in credit.needs:
        model = _policy(paths, recipe, acted)
        found["values"] = values_of(episodes, credit, model, template=template, token_budget=budget)
    if "matches" in credit.needs:
        found["matches"] = matches_of(episodes, credit, recipe)
    if "branches" in credit.needs:
        found["branches"] = branch_values(
            episodes, _branches(paths, mark), getattr(credit, "returns", Return())
        )
    if "answer" in credit.needs:
        form = answer_form(recipe)
        check_gold_answers(episodes)
        model = _policy(paths, recipe, acted)
        found["answer"] = answers_of(episodes, form, model, template=template, token_budget=budget)
    return found


def _branches(paths: RunPaths, mark: str) -> list[Trajectory]:
    """Episodes of an iteration that were played on from turns of explored ones."""
    file = paths.trajectories(f"branch{mark}")
    if not file.is_file():
        raise RunError(
            f"the credit reads episodes that were played on from turns of explored ones, and {file} is not there; "
            "explore with a section `branch` in the recipe."
        )
    return list(read_trajectories(file))


def _policy(paths: RunPaths, recipe: Recipe, name: str) -> str:
    """Model name or folder of a policy that a credit reads."""
    folder = paths.checkpoint(name)
    if name == "base" and recipe.base is None:
        return recipe.model.name
    if not (folder / "config.json").is_file():
        raise RunError(
            f"the credit reads policy {name!r}, and {folder} is not there; name one that is, such as --reference sft "
            "or --reference base."
        )
    return str(folder)


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


def _other(
    paths: RunPaths, recipe: Recipe, policy: str, mark: str, name: str, episodes: Sequence[Trajectory]
) -> list[CreditRow]:
    """Rows of the credit to compare with: those of the run, else by its defaults."""
    file = paths.credit(_label({"name": name}), mark)
    if file.is_file():
        return read_credits(file)
    credit = _make_credit({"name": name})
    needed = compute_needed(credit, episodes, paths, recipe, reference=policy, acted=policy, mark=mark)
    return credit_groups(episodes, credit, needed)
