"""The whole loop: collect, train, explore, pair, align, evaluate, report. Each step is done once."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from perturn.data.run_folder import Run, is_run, refuse_other, resolve_recipe, run_folder
from perturn.data.seals import Seals, refuse_damage
from perturn.engines import ApiSettings, LocalSettings, VllmSettings
from perturn.engines.local.engine import check_layers
from perturn.engines.vllm.engine import check_vllm
from perturn.episodes.episode import misfit
from perturn.errors import ConfigError, RunError
from perturn.losses import LOSSES
from perturn.memory import release_memory
from perturn.policy.adapters import add_adapters
from perturn.policy.logprobs import check_architecture
from perturn.policy.models import context_length, empty_model
from perturn.policy.weighing import choose_credit
from perturn.report import write_report
from perturn.run.collect import collect_expert, collect_explore
from perturn.run.evaluate import evaluate
from perturn.run.pair import make_pairs
from perturn.run.progress import console
from perturn.run.session import (
    check_api,
    choose_tasks,
    engine_settings,
    make_protocol,
    make_renderer,
    sft_tasks,
    world_maker,
)
from perturn.run.tracking import check_trackers
from perturn.run.train import lora_config, make_config, train_align, train_sft
from perturn.settings.recipe import Recipe, Train, build
from perturn.types import Environment, EpisodeProtocol, Task


def open_run(source: Path, overrides: Sequence[str] = (), command: str | None = None) -> Run:
    """Open the run of a recipe or of a run folder; a new one is checked before its folder is made.

    Args:
        source: The recipe or the folder.
        overrides: `key=value` words.
        command: The one command the run is opened for; None: the whole loop.

    Raises:
        PerturnError: The first mistake that can be found without working.
    """
    recipe = resolve_recipe(source, overrides)
    refuse_other(recipe)
    check_trackers(recipe.report_to)
    refuse_training(recipe, command)
    if not is_run(run_folder(recipe)):
        check(recipe, command)
    run = Run(recipe)
    try:
        refuse_damage(run.folder, run.manifest["files"])
        _refuse_orphans(run)
    except BaseException:
        run.close()
        raise
    return run


def _refuse_orphans(run: Run) -> None:
    """Refuse a run of which a stage was removed, but not what was made from it."""
    for step in loop(run.recipe):
        if step.needs and run.is_done(step.name) and not run.is_done(step.needs):
            if step.needs not in run.manifest["stages"]:  # brought from another run, as a benchmark does
                continue
            remedy = " ".join(made_from(run.folder, run.recipe, run.manifest["files"], step.needs))
            raise RunError(
                f"{run.folder}: {step.needs} is to be done again, but {step.name} was made from what it was; "
                f"restore it from a copy, or have that made again too: rm -r {remedy}"
            )


def made_from(folder: Path, recipe: Recipe, seals: Seals, stage: str) -> list[str]:
    """Files and folders of a stage and of all that follows from it: what to remove to have them made again."""
    stages = {stage}
    for step in loop(recipe):
        if step.needs in stages or (stage == "expert" and step.name == "pair"):
            stages.add(step.name)
    files = [Path(file) for file, one in seals.items() if one["stage"] in stages]
    roots = [Path(*file.parts[:2]) if file.parts[0] == "checkpoints" else file for file in files]
    return list(dict.fromkeys(shlex.quote(str(folder / root)) for root in roots))


def check(recipe: Recipe, command: str | None = None) -> None:
    """Build everything the steps will need, so that a mistake shows now and not hours later.

    Args:
        recipe: Of the run.
        command: The one command it is for; None: the whole loop.

    Raises:
        PerturnError: The first mistake that can be found without working.
    """
    protocol = make_protocol(recipe.protocol)
    engine = engine_settings(recipe)
    for name, settings, on_pairs in (("sft", recipe.sft, False), ("align", recipe.align, True)):
        if settings is not None:
            _check_training(recipe, name, settings, on_pairs)
    if isinstance(engine, ApiSettings):
        check_api(recipe, engine)
    else:
        if isinstance(engine, VllmSettings):
            check_vllm(engine)
        make_renderer(recipe, recipe.model.name)
        _check_model(recipe, engine, trains=command in (None, "train"))
    env = world_maker(recipe)()
    try:
        panels = {"sft": sft_tasks(recipe), "explore": recipe.explore.tasks}
        for name, panel in (panels | {"evaluate": recipe.evaluate.tasks}).items():
            try:
                tasks = choose_tasks(env, panel)
            except ConfigError as error:
                raise ConfigError(f"{name}.tasks: {error}") from error
        _check_format(env, tasks[0], protocol)
    finally:
        env.close()


def _check_format(env: Environment, task: Task, protocol: EpisodeProtocol) -> None:
    """Refuse a format whose actions the world cannot take; a world that cannot pose the task is heard of later."""
    try:
        problem = misfit(env.reset(task, 0), protocol)
    except Exception:  # noqa: BLE001  environments are code of others; a bad episode is data
        return
    if problem:
        raise ConfigError(f"{env.name} {problem}")


def refuse_training(recipe: Recipe, command: str | None) -> None:
    """Refuse to train what the engine serves, if it is not ours to train.

    Raises:
        ConfigError: If the command, or the whole loop of the recipe, trains.
    """
    trains = command == "train" or (command is None and (recipe.sft or recipe.align))
    if trains and not engine_settings(recipe).serves_checkpoints:
        raise ConfigError(
            f"engine {recipe.engine['name']!r} serves a model that cannot be trained here; take engine.name=local, "
            "or do without training: perturn collect, pair, evaluate or report."
        )
    history = make_protocol(recipe.protocol).history
    if trains and history is not None:
        raise ConfigError(
            f"protocol {recipe.protocol.name!r} shows the last {history} turns alone, so its episodes are not one "
            "sequence each and cannot be trained on; set protocol.history=full to train, and evaluate under it with "
            "perturn evaluate."
        )


def _check_training(recipe: Recipe, name: str, settings: Train, on_pairs: bool) -> None:
    loss = build(LOSSES, settings.loss, f"{name}.loss")
    choose_credit(loss, settings.loss, recipe.credit if on_pairs else None)
    if loss.needs_rejected is not on_pairs:
        fitting = [key for key, each in LOSSES.items() if each.needs_rejected is on_pairs]
        raise ConfigError(
            f"{name}.loss.name must be a loss on {'pairs' if on_pairs else 'single trajectories'} "
            f"({', '.join(fitting)}), got {settings.loss['name']!r}."
        )
    try:
        make_config(recipe, settings, run_folder(recipe), limit=None)
    except (ValueError, ConfigError) as error:  # of the trainer's own settings
        raise ConfigError(f"{name}: {error}") from error
    if settings.lora and importlib.util.find_spec("peft") is None:
        raise ConfigError(f'{name}.lora needs peft; run: pip install "perturn[lora]"')


def _check_model(recipe: Recipe, engine: LocalSettings | VllmSettings, trains: bool) -> None:
    """Build the model without its weights, and upon it what serves and trains it."""
    model = empty_model(recipe.model.name)
    if isinstance(engine, LocalSettings):
        check_layers(model)
    if trains:
        check_architecture(model)
    limit, most = context_length(model), recipe.model.max_length
    if limit is not None and most is not None and most > limit:
        raise ConfigError(f"model.max_length must be <= {limit}, the model's own limit, got {most}.")
    for name, settings in (("sft", recipe.sft), ("align", recipe.align)):
        if settings is not None and settings.lora is not None:
            try:
                add_adapters(empty_model(recipe.model.name), lora_config(settings.lora), recipe.seed)
            except ConfigError as error:
                raise ConfigError(f"{name}.lora: {error}") from error


@dataclass(frozen=True)
class Step:
    """One step of the loop."""

    name: str
    command: str
    """The command that does it."""
    needs: str | None
    """The step whose result it starts from."""
    work: Callable[[Run], None]


def loop(recipe: Recipe) -> list[Step]:
    """The steps of a run, in order."""
    if not engine_settings(recipe).serves_checkpoints:
        return [
            Step("expert", "collect", None, collect_expert),
            Step("evaluate-base", "evaluate", None, partial(evaluate, policy="base")),
            Step("explore", "collect", None, partial(collect_explore, policy="base")),
            Step("pair", "pair", "explore", make_pairs),
        ]
    assert recipe.align is not None
    aligned = str(recipe.align.loss["name"])
    return [
        Step("expert", "collect", None, collect_expert),
        Step("evaluate-base", "evaluate", None, partial(evaluate, policy="base")),
        Step("sft", "train", "expert", train_sft),
        Step("evaluate-sft", "evaluate", "sft", partial(evaluate, policy="sft")),
        Step("explore", "collect", "sft", collect_explore),
        Step("pair", "pair", "explore", make_pairs),
        Step("align", "train", "pair", train_align),
        Step(f"evaluate-{aligned}", "evaluate", "align", partial(evaluate, policy=aligned)),
    ]


def run_steps(run: Run, command: str | None = None) -> None:
    """Do the steps that are not done yet.

    Args:
        run: The run.
        command: Do the steps of one command only, those that can be done now; None: the whole loop.
    """
    steps = [step for step in loop(run.recipe) if command in (None, step.command)]
    run.steps = [step.name for step in steps]
    for step in steps:
        if run.is_done(step.name) and not _plays_again(run, step):
            console.print(f"{step.name}: done before", style="dim")
        elif command and step.needs and not run.is_done(step.needs):
            console.print(f"{step.name}: waits for {step.needs}")
        else:
            console.print(step.name, style="bold")
            step.work(run)
            release_memory()


def _plays_again(run: Run, step: Step) -> bool:
    """Whether a stage is done but for episodes of the expert that failed, and nothing was made from it yet."""
    if step.name != "expert" or not run.manifest["stages"]["expert"]["counts"].get("failed"):
        return False
    return not any(run.is_done(stage) for stage in ("sft", "pair"))


def run_all(run: Run) -> Path:
    """Do the whole loop and write the report; where nothing is trained, the evaluation is the loop."""
    run_steps(run, None if run.recipe.sft else "evaluate")
    return write_report(run.folder)
