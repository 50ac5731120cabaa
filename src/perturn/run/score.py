"""The recipe of a score: any model on any environment, without a recipe file and without training."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from perturn.envs import ENVIRONMENTS
from perturn.envs.load import environment_maker
from perturn.envs.protocols import PROTOCOLS
from perturn.errors import ConfigError
from perturn.faults import closing_world
from perturn.run.panels import choose_tasks
from perturn.settings.recipe import Recipe, Tasks, apply_overrides, parse
from perturn.types import Environment, Task

EVALUATION_SPLITS = ("test", "valid_unseen", "dev", "validation", "train")
"""Names under which environments keep tasks to be scored on, the first that one has being taken."""
TASKS = 50
"""Tasks of a score, where nobody says how many."""


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
        protocol: Name of the rules; None: the environment's own, else a plain instruction and 30 turns.
        overrides: `key=value` words. Without `name=`, the run is named after all that it depends on.

    Raises:
        PerturnError: If a setting is wrong, or the environment cannot start or has no such tasks.
    """
    data: dict[str, Any] = {"name": "", "model": {"name": model}, "environment": {"name": environment}}
    apply_overrides(data, [word for word in overrides if word.startswith("environment.")])
    with closing_world(environment_maker(data["environment"])()) as env:
        split, tasks = _tasks(env, split)
        rules = protocol or str(getattr(ENVIRONMENTS.get(environment), "protocol", ""))
        data["protocol"] = {"name": rules} if rules else _plain_rules(env, tasks[0])
    data["evaluate"] = {"tasks": {"split": split, "n": min(TASKS, len(tasks)) if n is None else n}}
    if rules not in PROTOCOLS or PROTOCOLS[rules].sampling is None:
        data["evaluate"]["sampling"] = {"max_new_tokens": 128}
    apply_overrides(data, overrides)
    data["name"] = data["name"] or _name(data)
    return parse(Recipe, data)


def _tasks(env: Environment, split: str | None) -> tuple[str, list[Task]]:
    """A split to score on and its tasks."""
    for name in EVALUATION_SPLITS if split is None else (split,):
        try:
            return name, choose_tasks(env, Tasks(name))
        except ConfigError:
            if split is not None:
                raise
    raise ConfigError(
        f"{env.name} has no split {', '.join(EVALUATION_SPLITS)}; name one of its own with --split."
    )


def _plain_rules(env: Environment, task: Task) -> dict[str, Any]:
    """Rules for an environment that has none of its own: its tools if it offers any, else a thought and an action."""
    return {
        "name": "plain",
        "format": "tools" if env.reset(task, 0).tools else "react",
        "system": "Solve the task, turn by turn.",
        "max_turns": 30,
    }


def _name(data: dict[str, Any]) -> str:
    """A name for the run that says what is scored; other settings give it another name."""
    digest = hashlib.blake2b(
        json.dumps(data, sort_keys=True, default=str).encode(), digest_size=3
    ).hexdigest()
    words = (str(data["environment"]["name"]), str(data["model"]["name"]).rstrip("/"))
    parts = [re.sub(r"[^\w.-]+", "-", word.rpartition("/")[2].rpartition(":")[2])[-60:] for word in words]
    return "-".join([*parts, digest])
