"""Helpers that the adapters to other libraries share: tasks that stand for seeds, and checks of returned values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from perturn.errors import EnvironmentFailure, check_fit, check_known, within
from perturn.faults import plain_scalar
from perturn.types import Observation, Task


def check_seeds(seeds: Mapping[str, int] | None) -> dict[str, int]:
    """Return the number of tasks in each split; for None, return 200 for `train` and 100 for `test`.

    Raises:
        ConfigError: If no split is given, or a split has no task.
    """
    counts = dict({"train": 200, "test": 100} if seeds is None else seeds)
    fits = counts and min(counts.values()) >= 1
    check_fit(fits, "seeds", "give each split a number of tasks >= 1", counts)
    return counts


def seed_tasks(seeds: Mapping[str, int], split: str) -> list[Task]:
    """Return the tasks of a split. Each task stands for a seed, and no two splits share a seed."""
    check_known(split, seeds, f"Unknown split {split!r}")
    names = list(seeds)
    first = sum(seeds[name] for name in names[: names.index(split)])
    return [Task(f"{split}/{n}", split=split, data={"seed": first + n}) for n in range(seeds[split])]


def task_seed(task: Task) -> int:
    """Return the seed that a task stands for.

    Raises:
        EnvironmentFailure: If the task has no seed, so `seed_tasks` did not make it.
    """
    seed = task.data.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise EnvironmentFailure(f"task {task.id!r} has no seed in its data, got {dict(task.data)!r:.80}.")
    return seed


def as_text(value: object, whose: str) -> str:
    """Check that a value is a text, and return it.

    Raises:
        EnvironmentFailure: If the value is not a text. The message has a remedy.
    """
    if not isinstance(value, str):
        raise EnvironmentFailure(
            f"{whose} is {value!r:.60} of type {type(value).__name__}, not a text. Remedy: write it as words first, "
            "such as in a wrapper of the environment."
        )
    return value


def as_number(value: object, whose: str) -> float:
    """Convert a value to a number; None counts as 0.

    Raises:
        EnvironmentFailure: If the value is not a number.
    """
    try:
        return 0.0 if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise EnvironmentFailure(
            f"{whose} is {value!r:.60}, which is not a number. Remedy: return a float."
        ) from None


def outcome_of(text: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Observation:
    """Convert the five values that Gymnasium's `step` returns to an observation.

    If `info` has no `success`, an episode counts as solved if it terminates with a positive reward in its last step.
    `info` may also have `valid`, `state_key` and `admissible_commands`.
    Values of the wrong type are kept, so that the caller can report them.

    Raises:
        EnvironmentFailure: If `info` is not a mapping, or its commands are a single text instead of a list.
    """
    admissible = admissible_of(info)
    success, valid = (info.get(name) for name in ("success", "valid"))
    reward = plain_scalar(reward)
    earned = isinstance(reward, Real) and bool(reward > 0)  # type: ignore[operator]
    return Observation(
        text,
        reward=reward,
        terminated=terminated or truncated,
        success=bool(terminated) and earned if success is None else bool(success),
        valid=valid is None or bool(valid),
        state_key=state_key_of(info),
        admissible=admissible,
    )


def state_key_of(info: Mapping[Any, Any]) -> Any:
    """Return the `state_key` of an `info`: a text, or a whole number as text. Other values are kept, to be reported."""
    key = info.get("state_key")
    return str(key) if isinstance(key, Integral) else key


def admissible_of(info: Any) -> tuple[str, ...]:
    """Return the commands that an `info` lists under `admissible_commands`.

    Raises:
        EnvironmentFailure: If `info` is not a mapping, or the commands are a single text instead of a list.
    """
    if not isinstance(info, Mapping):
        raise EnvironmentFailure(
            f"info is {info!r:.60}, not a dict. Remedy: return {{}} if there is nothing to say."
        )
    commands = info.get("admissible_commands")
    if isinstance(commands, str):
        raise EnvironmentFailure(
            f"info['admissible_commands'] is {commands!r:.60}, a text. Remedy: return a list of commands."
        )
    return () if commands is None else tuple(map(str, commands))  # `commands or ()` raises for a NumPy array


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema that transformers makes from a function's type hints and docstring.

    Raises:
        ConfigError: If the function lacks a part that the schema needs. The message names the part.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(tool, "__name__", repr(tool))
    remedy = " Write type hints and a docstring with `Args:`."
    with within(f"no schema can be made of tool {name}(): ", Exception, after=remedy):
        schema: dict[str, Any] = get_json_schema(tool)
    return schema
