"""Write a new recipe with the most important settings, or with every setting and its documentation (`perturn init`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from perturn.chat.model_names import PACKAGED
from perturn.config.commented_settings import commented_fields, inline_yaml
from perturn.config.overrides import apply_overrides
from perturn.config.parsing import to_mapping
from perturn.config.recipe import Recipe, make_recipe
from perturn.config.row_maker_settings import row_makers
from perturn.config.shipped_recipes import shipped_names, shipped_recipe
from perturn.envs.abilities import abilities_of
from perturn.envs.load_environment import environment_maker
from perturn.envs.named_protocols import PROTOCOLS
from perturn.envs.world_process import plays_itself
from perturn.errors import ConfigError, check_fit, check_known, required
from perturn.faults import closing_world
from perturn.io.atomic_write import write_whole
from perturn.io.read_input import parse_yaml
from perturn.io.yaml_scalars import value_of
from perturn.run.protocol_rules import evaluation_split, rules_for, some_task
from perturn.run.task_lists import list_tasks
from perturn.table import locate
from perturn.table_index import table

_MOST_TASKS = 10
_ROWS = {"expert-pairs": {"threshold": 0.4}}
"""Initial settings of row makers that differ from the defaults."""
_DOES = {
    "protocol": "the rules of an episode",
    "sft": "train on the expert's episodes",
    "explore": "sample episodes of the policy",
    "rows": "make training rows from episodes",
    "credit": "give each turn its weight",
    "align": "train on the rows",
    "evaluate": "score each policy on held-out tasks",
}
"""Comments on the sections of a short recipe."""


def write_recipe(
    file: Path,
    *,
    environment: str,
    model: str,
    loss: str | None = None,
    lora: bool = False,
    full: bool = False,
    overrides: Sequence[str] = (),
) -> None:
    """Write a recipe that runs as it is, and that users can edit.

    Args:
        file: The file to write; it must not exist.
        environment: A name of `ENVIRONMENTS`, or MODULE:CLASS.
        model: Hub id, local folder or bundled name of the model.
        loss: Loss of the alignment. None: tlm-dre on pairs, or ppo-clip on groups if the environment has no expert.
        lora: Whether to train adapters instead of all weights.
        full: Whether to write every setting, instead of only the settings that differ from their defaults.
        overrides: Overrides, as `key=value`, that replace the chosen values.

    Raises:
        ConfigError: If the file exists, or there is no such loss or environment.
    """
    _check_new(file)
    traits = {
        name: locate("perturn.losses.protocol:default_traits")(each) for name, each in table("losses").items()
    }
    kinds = {name: each.rows for name, each in traits.items() if each and each.rows != "single"}
    if loss is not None:
        check_known(loss, kinds, f"unknown loss {loss!r} for an alignment")
    world: dict[str, Any] = {"environment": {"name": environment}}
    apply_overrides(world, [word for word in overrides if word.startswith("environment.")])
    chosen = _chosen(file.stem, world["environment"], model, loss, kinds, lora)
    apply_overrides(chosen, overrides)
    recipe = make_recipe(chosen)
    _check_rows(recipe, traits)
    lines = commented_fields(Recipe, recipe, chosen, "") if full else _short(chosen, to_mapping(recipe))
    text = _header(file, environment, model, full) + "".join(f"{line}\n" for line in lines)
    make_recipe(parse_yaml(text, str(file), ConfigError, keep_texts=True))
    write_whole(file, text)


def _check_new(file: Path) -> None:
    """Raise an error if a file exists, so that it is not overwritten."""
    if file.exists():
        raise ConfigError(f"{file} exists and is left as it is; choose another name, or remove it.")


def _check_rows(recipe: Recipe, losses: Mapping[str, Any]) -> None:
    """Reject a row maker whose rows the loss of the alignment does not accept."""
    if recipe.rows is None or recipe.align is None or ":" in recipe.align.loss["name"]:
        return  # a class of the user's is checked when the recipe runs
    kind, name = recipe.rows.traits.makes, recipe.align.loss["name"]
    fitting = [each for each, traits in losses.items() if traits and traits.rows == kind]
    says = f"the rows of this recipe are {kind}, and loss {name!r} does not learn from {kind}"
    check_known(name, fitting, says, "Add align.loss.name with one of these.")


def _short(chosen: Mapping[str, Any], parsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a short recipe: the chosen settings, with a comment on each section."""
    for name, value in _typed(value_of(chosen), parsed).items():
        does = f"  # {_DOES[name]}" if name in _DOES else ""
        if isinstance(value, Mapping) and len(value) > 1:
            yield f"{name}:{does}"
            yield from (f"  {key}: {inline_yaml(each)}" for key, each in value.items())
        else:
            yield f"{name}: {inline_yaml(value)}{does}"


def _typed(chosen: Any, parsed: Any) -> Any:
    """Return the chosen settings, with texts where the recipe expects texts, such as `name: 007`."""
    if isinstance(chosen, Mapping) and isinstance(parsed, Mapping):
        return {key: _typed(each, parsed.get(key, each)) for key, each in chosen.items()}
    return parsed if isinstance(parsed, str) and not isinstance(chosen, str) else chosen


def copy_recipe(file: Path, name: str) -> None:
    """Copy a packaged recipe with its comments.

    Raises:
        ConfigError: If the file exists, or there is no packaged recipe of this name.
    """
    _check_new(file)
    check_known(name, shipped_names(), f"no recipe {name!r} comes with the package")
    found = shipped_recipe(name)
    assert found is not None
    write_whole(file, found.read_text(encoding="utf-8"))


def _rows(kind: str, has_expert: bool) -> dict[str, Any]:
    """Return the sections that make rows of a kind: a row maker that needs no branches and, for groups, a credit.

    Raises:
        ConfigError: If every such row maker needs an expert and the environment has none.
    """
    fitting = {
        name: one.traits
        for name, one in row_makers().items()
        if one.traits.makes == kind and not (one.traits.branches or one.traits.corrects or one.needs)
    }
    found = next((name for name, traits in fitting.items() if has_expert or not traits.expert), None)
    reader = f"rows that are {kind} come from {' or '.join(fitting)}, which read its episodes"
    found = required(found, "an expert of this environment", reader, "choose another --loss")
    several = kind == "groups" or not has_expert
    return {
        **({"iterations": 4} if several else {}),
        "rows": {"name": found} | _ROWS.get(found, {}),
        **({"credit": {"name": "rloo"}} if kind == "groups" else {}),
    }


def _chosen(
    name: str,
    environment: dict[str, Any],
    model: str,
    loss: str | None,
    kinds: Mapping[str, str],
    lora: bool,
) -> dict[str, Any]:
    """Return the settings that differ from the defaults, or that most users should check."""
    small = model == "smollm2-135m"
    with closing_world(environment_maker(environment)()) as env:
        has_expert = "expert" in abilities_of(env)
        taught, explored, evaluated = _task_lists(env, has_expert)
        packaged = _protocol_of_policy(model, environment)
        protocol = packaged or _protocol(env, "action" if small else "react")
    most = 512 if plays_itself(environment) else 128 if protocol.get("format") in ("react", "tools") else 32
    if packaged and (trained_with := PROTOCOLS[packaged["name"]].sampling):
        most = trained_with.max_new_tokens
    training: dict[str, Any] = {"batch_size": 4}
    if small:
        training["token_budget"] = 1024  # fits machines with little memory
    if lora:
        training |= {"lora": {}, "gradient_checkpointing": True}
    loss = loss or ("tlm-dre" if has_expert else "ppo-clip")
    rate, align_rate = _learning_rates(model, kinds[loss], lora)
    sft = {"loss": {"name": "sft"}, "tasks": taught, "epochs": 2, "learning_rate": rate, **training}
    rows = _rows(kinds[loss], has_expert)
    return {
        "name": name,
        "model": {"name": model},
        "environment": dict(environment),
        "protocol": protocol,
        **({"sft": sft} if has_expert else {}),
        "explore": {
            "tasks": explored,
            **({"samples": 8} if "iterations" in rows else {}),
            "sampling": {"temperature": 1.0, "max_new_tokens": most},
        },
        **rows,
        "align": {"loss": {"name": loss}, "epochs": 1, "learning_rate": align_rate, **training},
        "evaluate": {"tasks": evaluated, "sampling": {"temperature": 0.0, "max_new_tokens": most}},
        "seed": 0,
    }


def _learning_rates(model: str, kind: str, lora: bool) -> tuple[float, float]:
    """Return the learning rates of SFT and of an alignment on rows of a kind. Smaller models take larger rates."""
    if model in PACKAGED:  # policies of about a million parameters
        return 3e-4, 1e-4 if kind == "groups" else 1e-5
    if model == "smollm2-135m":
        return 1e-4, 3e-6
    return (1e-4, 1e-5) if lora else (2e-5, 1e-6)


def _task_lists(env: Any, has_expert: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return task lists for SFT, exploration and evaluation that the environment has enough tasks for.

    Without an expert there is no SFT, so exploration may have all tasks.
    """
    key, count = "per_kind", _per_kind
    if _per_kind(env, "train") < 2 <= _number(env, "train"):
        key, count = "n", _number  # a kind of one task cannot be in two task lists
    half = min(count(env, "train") // 2, _MOST_TASKS)
    must = "have 2 tasks or more, so that one can be trained on and another explored"
    there, remedy = _number(env, "train"), "Let tasks('train') list more."
    check_fit(half, f"split 'train' of environment {env.name!r}", must, there, remedy)
    split = evaluation_split(env)
    evaluated = min(count(env, split), _MOST_TASKS)
    explored = {key: half, "skip": half} if has_expert else {key: min(count(env, "train"), _MOST_TASKS)}
    return (
        {"split": "train", key: half},
        {"split": "train", **explored},
        {"split": split, key: evaluated},
    )


def _number(env: Any, split: str) -> int:
    """Return the number of tasks of a split."""
    return sum(_kinds(env, split).values())


def _per_kind(env: Any, split: str) -> int:
    """Return the number of tasks of the rarest kind in a split."""
    return min(_kinds(env, split).values(), default=0)


def _kinds(env: Any, split: str) -> Counter[str]:
    """Return the number of tasks of each kind."""
    return Counter(task.kind for task in list_tasks(env, split))


def _protocol_of_policy(model: str, environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the protocol that a policy of the package was trained under; None for other models or environments."""
    file = shipped_recipe(model) if model in PACKAGED else None
    if file is None:
        return None
    made_by = yaml.safe_load(file.read_text(encoding="utf-8"))
    fits = made_by["environment"]["name"] == environment["name"]
    return dict(made_by["protocol"]) if fits else None


def unfit_words(model: str, environment: str) -> str:
    """Return a warning if a policy of the package was trained in another environment; else an empty text."""
    known = model not in PACKAGED or _protocol_of_policy(model, {"name": environment}) is not None
    says = f"{model} knows only the words of its household games. If {environment} uses other words, it cannot tell"
    return "" if known else f"{says} them apart: choose a pretrained model, such as smollm2-135m."


def _protocol(env: Any, form: str) -> dict[str, Any]:
    """Return the rules that an environment declares, or else default rules."""
    rules = dict(rules_for(None, env, lambda: some_task(env)).settings)
    named = PROTOCOLS.get(str(rules["name"]))
    return rules if named is None or named.format in ("tools", "plain") else {**rules, "format": form}


def _header(file: Path, environment: str, model: str, full: bool) -> str:
    says = (
        "# Lines with a key right after # are defaults: remove the #, and the # of their section, to change them.\n"
        "# Learning rates and task lists are starting points that nobody has tuned.\n"
        if full
        else "# These values are starting points that nobody has tuned. All settings: perturn init --full\n\n"
    )
    command = f"perturn run {quote(str(file))}"
    return (
        f"# {model} on {environment}.\n"
        f"# Command:  {command}   (first: {command} --dry-run)\n"
        "# Hardware: not measured yet\n"
        "# Time:     not measured yet\n"
        "# Result:   not measured yet\n"
        f"{'#' + chr(10) if full else ''}{says}"
    )
