"""Open the engine of a policy: during a run, or to serve a policy of a run or any model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from perturn.chat.model_names import BUNDLED, for_engine
from perturn.chat.templates import chat_template
from perturn.cluster import Replicas
from perturn.config.overrides import apply_overrides
from perturn.config.parsing import build, parse, to_mapping, to_yaml
from perturn.config.recipe import REWARD_MODEL, Recipe, make_recipe
from perturn.config.sections import ModelSettings
from perturn.config.stages import rank_of_loop, stages
from perturn.data.run_folder import Run, resolve_recipe, run_folder
from perturn.data.run_paths import RunPaths
from perturn.display.progress_bars import console
from perturn.engines import ENGINES, EngineSettings, Serving
from perturn.engines.engine_process import EngineProcess
from perturn.episodes.formats import FORMATS
from perturn.errors import ConfigError, RunError, check_known, check_type, did_you_mean
from perturn.io.atomic_write import write_whole
from perturn.io.user_code import load_object
from perturn.run.judging.side_engines import checked_settings, loading
from perturn.run.policy_origin import Maker
from perturn.run.protocol_rules import make_protocol
from perturn.table import locate
from perturn.types import Engine


def policy_path(run: Run | Maker, policy: str) -> str:
    """Return the folder of a run's policy; for the base, the name or folder of the model.

    Raises:
        RunError: If the policy has not been trained yet, or was deleted.
    """
    if policy == "base" and run.recipe.base is None:
        return run.recipe.model.name
    folder = run.paths.checkpoint(policy)
    if not (folder / "config.json").is_file():
        raise RunError(
            f"policy {policy!r} is not trained yet, or its iteration is long past ({folder} is missing); run: perturn "
            f"train {quote(str(run.paths.folder))}. A policy of a past iteration was not kept: restore it "
            "from a copy, or choose another name (name=...)."
        )
    return str(folder)


def engine_settings(recipe: Recipe) -> EngineSettings:
    """Return the settings of the recipe's engine.

    Raises:
        ConfigError: If there is no such engine, a setting is wrong, or an engine of another package lacks a method or
            trait.
    """
    return checked_settings(recipe.engine, "engine")


def require_weights(recipe: Recipe, reader: str, otherwise: str) -> None:
    """Raise an error if a part of the run needs a policy's weights, and the engine does not serve checkpoints.

    Args:
        recipe: Recipe of the run.
        reader: Start of the message: the part of the run, and what it reads.
        otherwise: Alternative that works with this engine, for the message.

    Raises:
        ConfigError: If the engine serves only models of a server.
    """
    if not engine_settings(recipe).traits.serves_checkpoints:
        raise ConfigError(
            f"{reader}, which engine {recipe.engine['name']!r} does not give; take engine.name=local, or {otherwise}."
        )


def open_engine(run: Run, policy: str) -> Engine:
    """Open the engine that serves a policy of the run.

    Raises:
        RunError: If the policy is not trained yet, or the engine can serve only the recipe's model.
    """
    recipe, cluster = run.recipe, run.recipe.cluster
    if not engine_settings(recipe).traits.serves_checkpoints:
        if policy == "base":
            return serve_policy(recipe, policy, None, run.folder, recipe.model.name)
        raise RunError(
            f"engine {recipe.engine['name']!r} serves model {recipe.model.name!r} alone, not policy {policy!r}."
        )
    template = chat_template(recipe.model)
    path, base = handed_over(recipe, policy_path(run, policy))
    if cluster is not None and cluster.engines:
        return Replicas(cluster, partial(serve_policy, recipe, policy, template, None), path)
    return serve_policy(recipe, policy, template, run.folder, path, base)


def handed_over(recipe: Recipe, path: str) -> tuple[str, str | None]:
    """Return the folder that the engine loads for a policy and, if it holds adapters, the folder of their base."""
    return for_engine(path, _adapters_taken(recipe), console.print)


def handed_rank(recipe: Recipe) -> int:
    """Return the largest rank of adapters that the engine will load; 0 if it loads whole models."""
    return min(rank_of_loop(recipe), _adapters_taken(recipe))


def _adapters_taken(recipe: Recipe) -> int:
    """Return the largest rank of adapters that the engine can load; 0 if the loop exceeds it, or for replicas."""
    far = recipe.cluster is not None and recipe.cluster.engines
    most = 0 if far else engine_settings(recipe).traits.adapter_rank
    return most if rank_of_loop(recipe) <= most else 0


def serve_policy(
    recipe: Recipe,
    policy: str,
    template: str | None,
    folder: Path | None,
    path: str,
    base: str | None = None,
) -> Engine:
    """Open the engine in this process, which may be on another machine than the run folder."""
    stop = FORMATS[make_protocol(recipe.protocol).format].stop
    tokens = partial(locate, "perturn.policy.models:load_tokens")
    serving = Serving(
        policy,
        path,
        tuple(stop),
        loading(path, policy, recipe.model.dtype, template),
        folder,
        lambda: tokens()(path, template),
        base=base,
        adapter_rank=handed_rank(recipe),
        deterministic=recipe.deterministic,
    )
    return engine_settings(recipe).open(serving)


def open_policy(source: str, overrides: Sequence[str] = (), say: Callable[[str], None] = print) -> Engine:
    """Open an engine that serves a policy of a run, or any model.

    Args:
        source: A Hub id, a folder or a bundled name of a model; or the folder of a run, with `:POLICY` for another
            policy than the policy that it trained last.
        overrides: Overrides, such as `engine.name=vllm`.
        say: Function that is called with a message before slow work starts.

    Raises:
        PerturnError: If there is no such model, run or policy, or the engine cannot serve it.
    """
    return _open(*_served(source, overrides), say)


def open_beside(source: str, overrides: Sequence[str], say: Callable[[str], None]) -> Engine | EngineProcess:
    """Open an engine that does not slow down this process: an engine that computes locally gets its own process.

    Args:
        source: The policy or model, as in `open_policy`.
        overrides: Overrides, as in `open_policy`.
        say: Function for messages, as in `open_policy`, if the engine is opened in this process.

    Raises:
        PerturnError: If there is no such model, run or policy, or the engine cannot serve it.
    """
    settings, *_ = _served(source, overrides)
    if settings.traits.computes_here:
        return EngineProcess(partial(_open_there, source, overrides))
    return open_policy(source, overrides, say)


def _open_there(source: str, overrides: Sequence[str]) -> Engine:
    """Open the engine of a policy in its own process."""
    return open_policy(source, overrides, console.print)


def _served(source: str, overrides: Sequence[str]) -> tuple[EngineSettings, str, str, str, str | None]:
    """Return the engine's settings, and a policy's name, folder or Hub id, dtype and chat template."""
    folder, _, policy = source.partition(":")
    words: dict[str, Any] = {}
    apply_overrides(words, overrides)
    for word in words:
        check_known(word, ("engine", "model"), f"{word} is not a section of a served model")
    section = words.get("model", {})
    check_type("model", section, dict, "a section of settings, such as model.dtype=bfloat16")
    if unread := [key for key in ("name", "max_length") if key in section]:
        raise ConfigError(f"serving a model reads no model.{unread[0]}; leave it out.")
    if RunPaths(Path(folder)).is_run:
        recipe = resolve_recipe(Path(folder), overrides)
        name, path = _policy_of(recipe, policy)
        return engine_settings(recipe), name, path, recipe.model.dtype, chat_template(recipe.model)
    settings: EngineSettings = build(ENGINES, {"name": "local"} | words.get("engine", {}), "engine")
    model = parse(ModelSettings, {**section, "name": source}, "model")
    return settings, Path(source).name, source, model.dtype, chat_template(model)


def _policy_of(recipe: Recipe, policy: str) -> tuple[str, str]:
    """Return the name and the folder of a run's policy; by default, of the policy that was trained last.

    A reward model is returned only by its name.
    """
    paths = RunPaths(run_folder(recipe))
    sections = {stage.policy: stage.section for stage in stages(recipe) if stage.command == "train"}
    there = [name for name in sections if (paths.checkpoint(name) / "config.json").is_file()]
    acting = [name for name in there if sections[name] != REWARD_MODEL]
    wanted = policy or (acting[-1] if acting else "base")
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

    load = loading(path, name, dtype, template, say)
    tokens = partial(locate, "perturn.policy.models:load_tokens")
    return settings.open(
        Serving(name, path, (), load, load_tokens=lambda: tokens()(path, template), base=base)
    )


def recipe_of_record(folder: Path, source: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of the episodes that an endpoint records, with which other commands read them as a run.

    Args:
        folder: Folder in which the endpoint records.
        source: The policy or model, as in `open_policy`.
        overrides: Overrides, as in `open_policy`.

    Raises:
        PerturnError: If the folder has episodes of another model, or there is no such run or policy.
    """
    run, _, policy = source.partition(":")
    words: dict[str, Any] = {}
    if RunPaths(Path(run)).is_run:
        recipe = resolve_recipe(Path(run), overrides)
        known = to_mapping(recipe)
        words = {"model": known["model"], "engine": known["engine"]}
        source = _policy_of(recipe, policy)[1]
    else:
        apply_overrides(words, overrides)
    local = Path(source).expanduser()
    is_folder = source not in BUNDLED and local.is_dir()  # readers may have another working directory
    name = str(local.resolve()) if is_folder else source
    words["model"] = {**words.get("model", {}), "name": name}
    choices = {
        "environment": {"name": "agent"},
        "rows": {"name": "groups"},
        "credit": {"name": "rloo"},
        "align": {"loss": {"name": "ppo-clip"}},
    }
    made = make_recipe({**words, **choices, "name": folder.resolve().name})
    if RunPaths(folder).is_run and name != (recorded := resolve_recipe(folder).model.name):
        raise RunError(
            f"{folder} has episodes of model {recorded}, and {name} is served; record in another folder."
        )
    return made


def begin_record(folder: Path, recipe: Recipe) -> None:
    """Write the recipe of `recipe_of_record` in the folder of the episodes, unless the folder has a recipe."""
    paths = RunPaths(folder)
    if not paths.is_run:
        found = {"recipe": recipe.name, "stages": {"explore": {"done": True}}, "files": {}}
        write_whole(paths.manifest, json.dumps(found))
        write_whole(paths.recipe, to_yaml(recipe))


def reward_function(where: str) -> Callable[[Any], Any]:
    """Load a reward function, given as `MODULE:FUNCTION` or `FILE.py:FUNCTION`.

    Raises:
        ConfigError: If there is no such function.
    """
    judge: Callable[[Any], Any] = load_object(where)
    check_type(f"--reward {where!r}", judge, Callable, "a function, such as my_package.rewards:judge")
    return judge
