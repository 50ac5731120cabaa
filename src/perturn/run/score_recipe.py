"""Make the recipe that evaluates a model in an environment, without a recipe file and without training."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perturn.chat.model_names import PACKAGED
from perturn.config.overrides import apply_overrides
from perturn.config.parsing import dotted, parse
from perturn.config.recipe import Recipe, make_recipe, read_recipe
from perturn.config.sections import Tasks
from perturn.config.shipped_recipes import shipped_recipe
from perturn.envs.load_environment import environment_maker
from perturn.envs.named_protocols import PROTOCOLS
from perturn.errors import ConfigError
from perturn.faults import closing_world
from perturn.run.policy_origin import made_by
from perturn.run.protocol_rules import Rules, evaluation_split, rules_for, say_rules
from perturn.run.task_lists import choose_tasks
from perturn.types import Environment

TASKS = 50
"""Default number of tasks."""
TURN_TOKENS = 128
"""Default token limit of a turn, if neither protocol nor user sets one."""
ACTION_TOKENS = 32
"""Default token limit of a turn that is an action without a thought. A low limit reduces the cost of useless text."""


def scoring_recipe(
    model: str,
    environment: str,
    *,
    split: str | None = None,
    n: int | None = None,
    protocol: str | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """Return the recipe of a run that only evaluates one model.

    Args:
        model: Hub id, local folder or bundled name; with `engine.name=api`, the name of the model on its server.
        environment: A name of `ENVIRONMENTS`, or MODULE:CLASS.
        split: Split of the tasks. None: the first of `EVALUATION_SPLITS` that has tasks.
        n: Number of tasks, each kind about as often as in the split. None: 50, or all tasks if there are fewer.
        protocol: Name of a protocol. None: the rules under which a run trained the policy in this environment, else the
            environment's rules, else defaults.
        overrides: Overrides, as `key=value`. Without `name=`, the name of the run is made from all its settings.

    Raises:
        PerturnError: If a setting is wrong, or the environment cannot start or has no such tasks.
    """
    given = {
        "model.name": ("the model", model),
        "environment.name": ("the environment", environment),
        "evaluate.tasks.split": ("--split", split),
        "evaluate.tasks.n": ("--n", n),
        "protocol.name": ("--protocol", protocol),
    }
    for key, (by, value) in given.items():
        if value is not None:
            _refuse_repeated(overrides, key, by)
    data: dict[str, Any] = {"name": "", "model": {"name": model}, "environment": {"name": environment}}
    apply_overrides(data, [word for word in overrides if word.startswith("environment.")])
    with closing_world(environment_maker(data["environment"])()) as env:
        task_list = scored_tasks(env, split, n)
        learned = None if protocol else learned_rules(model, environment)
        rules = learned or rules_for(protocol, env, lambda: choose_tasks(env, Tasks(task_list.split))[0])
        name = env.name
    data["evaluate"] = {"tasks": {"split": task_list.split, "n": task_list.n}}
    data["protocol"] = dict(rules.settings)
    own = [word for word in overrides if word.startswith("protocol.")]
    apply_overrides(data, own)
    named = PROTOCOLS.get(data["protocol"]["name"])
    if named is None or named.sampling is None:
        data["evaluate"]["sampling"] = {"max_new_tokens": turn_tokens(data["protocol"].get("format"))}
    apply_overrides(data, overrides)
    said = {word.partition("=")[0].removeprefix("protocol.") for word in own}
    sources = {key: each for key, each in rules.sources.items() if key not in said}
    recipe = make_recipe({**data, "name": data["name"] or "score"})
    say_rules(replace(rules, sources=sources), name)
    return recipe if data["name"] else replace(recipe, name=_name(recipe, data))


def _refuse_repeated(overrides: Sequence[str], key: str, by: str) -> None:
    """Reject an override of a setting that an option or argument sets, or of the section around it."""
    sections = [key, *(key.rsplit(".", times)[0] for times in range(1, key.count(".") + 1))]
    found: dict[str, Any] = {}
    apply_overrides(found, overrides)
    named = [each for each in sections if each in {word.partition("=")[0] for word in overrides}]
    if named or key in dotted(found):
        raise ConfigError(f"{by} sets {key}; leave {(named or [key])[0]}=... out.")


def scored_tasks(env: Environment, split: str | None, n: int | None) -> Tasks:
    """Return the task list of an evaluation: `n` tasks of a split, or the defaults.

    Raises:
        ConfigError: If there is no such split.
    """
    name = evaluation_split(env) if split is None else split
    there = len(choose_tasks(env, Tasks(name)))
    return parse(Tasks, {"split": name, "n": min(TASKS, there) if n is None else n})


def learned_rules(model: str, environment: str) -> Rules | None:
    """Return the rules under which a policy was trained in an environment; None if they are not known.

    Args:
        model: Name of a packaged policy, or folder of a run's checkpoint.
        environment: Name of the environment, as in a recipe.
    """
    if model in PACKAGED:  # a packaged recipe of the same name has trained it
        recipe: Recipe | None = read_recipe(shipped_recipe(model) or Path(model))
    else:
        maker = made_by(model)
        recipe = maker.recipe if maker else None
    if recipe is None or (recipe.environment or {}).get("name") != environment:
        return None
    if recipe.protocol is None or recipe.protocol.name is None:
        return None
    settings = {key: value for key, value in asdict(recipe.protocol).items() if value is not None}
    return Rules(settings, dict.fromkeys(settings, "as the policy was trained"))


def turn_tokens(form: str | None) -> int:
    """Return the default token limit of a turn in a format."""
    return ACTION_TOKENS if form == "action" else TURN_TOKENS


def _name(recipe: Recipe, data: dict[str, Any]) -> str:
    """Return a name for the run from its environment, its model and a digest of all its settings."""
    digest = hashlib.blake2b(
        json.dumps(data, sort_keys=True, default=str).encode(), digest_size=3
    ).hexdigest()
    words = (str((recipe.environment or {"name": ""})["name"]), recipe.model.name.rstrip("/"))
    parts = [re.sub(r"[^\w.-]+", "-", word.rpartition("/")[2].rpartition(":")[2])[-60:] for word in words]
    return "-".join([*parts, digest])
