"""The recipe of a score: any model on any environment, without a recipe file and without training."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perturn.envs import ENVIRONMENTS
from perturn.envs.load import environment_maker
from perturn.envs.protocols import PROTOCOLS
from perturn.errors import ConfigError
from perturn.faults import closing_world
from perturn.policy.names import PACKAGED
from perturn.run.maker import made_by
from perturn.run.panels import choose_tasks
from perturn.settings.parsing import apply_overrides, parse
from perturn.settings.recipe import Recipe, read_recipe
from perturn.settings.sections import Tasks
from perturn.settings.shipped import shipped_recipe
from perturn.types import Environment, Task

EVALUATION_SPLITS = ("test", "valid_unseen", "dev", "validation", "train")
"""Names under which environments keep tasks to be scored on, the first that one has being taken."""
TASKS = 50
"""Tasks of a score, where nobody says how many."""
TURN_TOKENS = 128
"""Tokens of a turn, where neither protocol nor user says how many."""
ACTION_TOKENS = 32
"""The same where a turn is an action without a thought, so that babble costs a quarter of the time."""


def scoring_recipe(
    model: str,
    environment: str,
    *,
    split: str | None = None,
    n: int | None = None,
    protocol: str | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """The recipe of a run that scores one model and does nothing else.

    Args:
        model: Hub id, local folder, bundled name, or the name of a model at the server of `engine.name=api`.
        environment: A name of `ENVIRONMENTS`, or MODULE:CLASS.
        split: Split of the tasks; None: the first of `EVALUATION_SPLITS` that there is.
        n: Tasks, each kind about as often as in the split; None: 50, or all if there are fewer.
        protocol: Name of the rules; None: those that the policy was trained under, if a run trained it in this
            environment, else the environment's own, else a plain instruction and 30 turns.
        overrides: `key=value` words. Without `name=`, the run is named after all that it depends on.

    Raises:
        PerturnError: If a setting is wrong, or the environment cannot start or has no such tasks.
    """
    data: dict[str, Any] = {"name": "", "model": {"name": model}, "environment": {"name": environment}}
    apply_overrides(data, [word for word in overrides if word.startswith("environment.")])
    with closing_world(environment_maker(data["environment"])()) as env:
        panel = scored_panel(env, split, n)
        first = choose_tasks(env, Tasks(panel.split))[0]
        learned = None if protocol else learned_rules(model, environment)
        data["protocol"] = learned or rules_for(protocol, environment, env, first)
    data["evaluate"] = {"tasks": {"split": panel.split, "n": panel.n}}
    apply_overrides(data, [word for word in overrides if word.startswith("protocol.")])
    if getattr(PROTOCOLS.get(data["protocol"]["name"]), "sampling", None) is None:
        data["evaluate"]["sampling"] = {"max_new_tokens": turn_tokens(data["protocol"].get("format"))}
    apply_overrides(data, overrides)
    recipe = parse(Recipe, {**data, "name": data["name"] or "score"})
    return recipe if data["name"] else replace(recipe, name=_name(recipe, data))


def scored_panel(env: Environment, split: str | None, n: int | None) -> Tasks:
    """The panel of a score: `n` tasks of a split, and what is chosen where nobody says.

    Raises:
        ConfigError: If there is no such split.
    """
    for name in EVALUATION_SPLITS if split is None else (split,):
        try:
            there = len(choose_tasks(env, Tasks(name)))
        except ConfigError:
            if split is not None:
                raise
        else:
            return parse(Tasks, {"split": name, "n": min(TASKS, there) if n is None else n})
    raise ConfigError(f"{env.name} has no split {', '.join(EVALUATION_SPLITS)}; name one of its own.")


def learned_rules(model: str, environment: str) -> dict[str, Any] | None:
    """Return the section `protocol` of the recipe that trained a policy in an environment; None: none is known.

    Args:
        model: A policy that comes with the package, or the folder of one among the checkpoints of a run.
        environment: Its name in a recipe.

    Raises:
        ConfigError: If this version cannot read that recipe.
    """
    if model in PACKAGED:  # made by the recipe of its name, which comes with the package too
        recipe: Recipe | None = read_recipe(shipped_recipe(model) or Path(model))
    else:
        maker = made_by(model)
        recipe = maker.recipe if maker else None
    if recipe is None or recipe.protocol is None or (recipe.environment or {}).get("name") != environment:
        return None
    return {key: value for key, value in asdict(recipe.protocol).items() if value is not None}


def rules_for(protocol: str | None, environment: str, env: Environment, task: Task) -> dict[str, Any]:
    """The section `protocol` of a score.

    Args:
        protocol: A name; None: the environment's own rules, else a thought and an action, or tools if it has some.
        environment: Its name in a recipe.
        env: A world of it.
        task: One that it can pose.
    """
    named = protocol or getattr(ENVIRONMENTS.get(environment), "protocol", None)
    if named:
        return {"name": named}
    return {
        "name": "plain",
        "format": "tools" if env.reset(task, 0).tools else "react",
        "system": "Solve the task, turn by turn.",
        "max_turns": 30,
    }


def turn_tokens(form: str | None) -> int:
    """Tokens of a turn in a format, where neither protocol nor user says how many."""
    return ACTION_TOKENS if form == "action" else TURN_TOKENS


def _name(recipe: Recipe, data: dict[str, Any]) -> str:
    """A name for the run that says what is scored; other settings give it another name."""
    digest = hashlib.blake2b(
        json.dumps(data, sort_keys=True, default=str).encode(), digest_size=3
    ).hexdigest()
    words = (str((recipe.environment or {"name": ""})["name"]), recipe.model.name.rstrip("/"))
    parts = [re.sub(r"[^\w.-]+", "-", word.rpartition("/")[2].rpartition(":")[2])[-60:] for word in words]
    return "-".join([*parts, digest])
