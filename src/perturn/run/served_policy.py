"""Open the engine of a policy to serve: a model by its name, or a policy of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perturn.chat.model_names import for_engine
from perturn.chat.templates import chat_template
from perturn.config.parsing import apply_overrides, build, parse, to_mapping, to_yaml
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.data.run_folder import resolve_recipe, run_folder
from perturn.data.run_paths import RunPaths
from perturn.engines import ENGINES, EngineSettings, Loaded, Serving
from perturn.envs.load_environment import load_object
from perturn.errors import ConfigError, RunError, did_you_mean
from perturn.io.atomic_write import write_whole
from perturn.run.session import engine_settings
from perturn.table import locate
from perturn.types import Engine


def open_policy(source: str, overrides: Sequence[str], say: Callable[[str], None]) -> Engine:
    """Open the engine that serves a policy.

    Args:
        source: A Hub id, a folder or a bundled name of a model; or the folder of a run, with `:POLICY` for another
            policy than the last one that it trained.
        overrides: Settings such as `engine.name=vllm`.
        say: Told what is done before anything slow starts.

    Raises:
        PerturnError: If there is no such model, run or policy, or the engine cannot serve it.
    """
    folder, _, policy = source.partition(":")
    if RunPaths(Path(folder)).is_run:
        recipe = resolve_recipe(Path(folder), overrides)
        name, path = _policy_of(recipe, policy)
        return _open(
            engine_settings(recipe), name, path, recipe.model.dtype, chat_template(recipe.model), say
        )
    words: dict[str, Any] = {}
    apply_overrides(words, overrides)
    if unknown := sorted(words.keys() - {"engine", "model"}):
        raise ConfigError(
            f"{unknown[0]} is no setting of a served model; settings are engine.* and model.dtype."
        )
    settings: EngineSettings = build(ENGINES, {"name": "local"} | words.get("engine", {}), "engine")
    dtype = str(words.get("model", {}).get("dtype", "auto"))
    return _open(settings, Path(source).name, source, dtype, None, say)


def _policy_of(recipe: Recipe, policy: str) -> tuple[str, str]:
    """Name and folder of a policy of a run; by default of the last one that was trained."""
    paths = RunPaths(run_folder(recipe))
    trained = [stage.policy for stage in stages(recipe) if stage.command == "train"]
    there = [name for name in trained if (paths.checkpoint(name) / "config.json").is_file()]
    wanted = policy or (there[-1] if there else "base")
    if wanted == "base" and recipe.base is None:
        return wanted, recipe.model.name
    if wanted not in there:
        raise RunError(
            f"{paths.folder} has no policy {wanted!r} to serve.{did_you_mean(wanted, ['base', *there])}"
        )
    return wanted, str(paths.checkpoint(wanted))


def _open(
    settings: EngineSettings,
    name: str,
    path: str,
    dtype: str,
    template: str | None,
    say: Callable[[str], None],
) -> Engine:
    base = None
    if settings.traits.serves_checkpoints:
        path, base = for_engine(path, settings.traits.adapter_rank, say)

    def load() -> Loaded:
        loaded: Loaded = locate("perturn.policy.models:load_policy")(
            path, policy=name, dtype=dtype, template=template, say=say
        )
        return loaded

    tokens = partial(locate, "perturn.policy.models:load_tokens")
    return settings.open(
        Serving(name, path, (), load, load_tokens=lambda: tokens()(path, template), base=base)
    )


def begin_record(folder: Path, source: str, overrides: Sequence[str]) -> None:
    """Write a recipe beside the episodes of an endpoint, unless there is one, so that they can be read as a run's.

    Args:
        folder: In which the endpoint records.
        source: What is served, as `open_policy` has it.
        overrides: Settings, as `open_policy` has them.

    Raises:
        PerturnError: If the recipe cannot be written.
    """
    paths = RunPaths(folder)
    if paths.is_run:
        return
    run, _, policy = source.partition(":")
    words: dict[str, Any] = {}
    if RunPaths(Path(run)).is_run:
        recipe = resolve_recipe(Path(run), overrides)
        served = to_mapping(recipe)
        words = {
            "model": {**served["model"], "name": _policy_of(recipe, policy)[1]},
            "engine": served["engine"],
        }
    else:
        apply_overrides(words, overrides)
        words["model"] = {**words.get("model", {}), "name": source}
    choices = {
        "environment": {"name": "agent"},
        "rows": {"name": "groups"},
        "credit": {"name": "rloo"},
        "align": {"loss": {"name": "ppo-clip"}},
    }
    made = parse(Recipe, {**words, **choices, "name": folder.resolve().name})
    write_whole(
        paths.manifest, json.dumps({"recipe": made.name, "stages": {"explore": {"done": True}}, "files": {}})
    )
    write_whole(paths.recipe, to_yaml(made))


def reward_function(where: str) -> Callable[[Any], Any]:
    """Load a function that gives rewards, `MODULE:FUNCTION` or `FILE.py:FUNCTION`.

    Raises:
        ConfigError: If there is none.
    """
    found = load_object(where)
    if not callable(found):
        raise ConfigError(f"--reward {where!r} must be a function, such as my_package.rewards:judge.")
    judge: Callable[[Any], Any] = found
    return judge
