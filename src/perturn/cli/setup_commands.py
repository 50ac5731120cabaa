"""Commands that create or check the inputs of a run: a recipe, a model, an environment."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from perturn.cli._base import AsJson, Overrides, command, existing, results, say_json
from perturn.cli.view_commands import list_table
from perturn.display.progress_bars import at_work
from perturn.display.progress_bars import console as notices
from perturn.errors import check_belongs, check_fit, check_known, required


@command(
    "init",
    "my.yaml --environment scienceworld --model smollm2-135m",
    'my.yaml --environment scienceworld --model smollm2-135m "environment.kinds=[find-plant]"',
    "my.yaml --environment examples/own_environment.py:GuessNumber --model Qwen/Qwen2.5-0.5B-Instruct --lora",
    "--list",
    "my.yaml --from demo",
    panel="Prepare",
)
def init(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", callback=existing, help="New recipe file to write.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="Name in `list environments`, or MODULE:CLASS.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, local folder, tiny-agent, or smollm2-135m.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Loss; default: tlm-dre, or ppo-clip without an expert."),
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA adapters instead of all weights.")] = False,
    recipe: Annotated[str | None, typer.Option("--from", help="Name of a bundled recipe to copy.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Write every setting, with its meaning.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the bundled recipes.")] = False,
    overrides: Overrides = None,
) -> None:
    """Write a recipe for an environment and a model."""
    from perturn.run.recipe_template import copy_recipe, unfit_words, write_recipe

    options: dict[str, object] = {
        "--environment": environment,
        "--model": model,
        "--loss": loss,
        "--lora": lora,
        "--full": full,
        **dict.fromkeys(overrides or (), True),
    }
    if listed:
        own = {"FILE": file, "--from": recipe, **options}
        check_belongs(own, False, "init without --list", "leave it out")
        list_table("recipes")
        return
    file = required(file, "FILE", "init writes it", "name it, or give --list for the bundled recipes")
    if recipe is not None:
        check_belongs(options, False, "init without --from", "leave it out, and edit the copied recipe")
        copy_recipe(file, recipe)
        _say_next(file)
        return
    remedy = "give it, or --from to copy a bundled recipe"
    chosen: dict[str, Any] = {
        "environment": required(environment, "--environment", "init needs it", remedy),
        "model": required(model, "--model", "init needs it", remedy),
        "loss": loss,
        "lora": lora,
        "full": full,
    }
    write_recipe(file, **chosen, overrides=overrides or [])
    if unfit := unfit_words(chosen["model"], chosen["environment"]):
        results.print(unfit, style="yellow", markup=False, soft_wrap=True)
    _say_next(file)


def _say_next(file: Path) -> None:
    """Print the name of a new recipe file, and the command to call next."""
    again = f"perturn run {quote(str(file))} --dry-run"
    results.print(f"wrote {file}; next: {again}", markup=False, soft_wrap=True)


@command(
    "check-env",
    "examples/own_environment.py:GuessNumber",
    "my_package.my_env:MyEnvironment environment.size=4 --split test --json",
    codes="0 it keeps the contract; 1 it does not; 2 it cannot be loaded.",
    panel="Prepare",
)
def check_env(
    environment: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="Your environment; also as FILE.py:CLASS.")
    ],
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="Split to take tasks from.")] = "train",
    as_json: AsJson = False,
) -> None:
    """Check an environment and print the rules of its episodes."""
    from perturn.config.overrides import apply_overrides
    from perturn.config.parsing import build
    from perturn.envs.environment_check import check_environment
    from perturn.io.user_code import load_object
    from perturn.run.protocol_rules import check_rules

    recipe: dict[str, Any] = {"environment": {"name": environment}}
    apply_overrides(recipe, overrides or [])
    section = recipe.pop("environment")
    must = "be settings of the environment, such as environment.size=4"
    check_fit(not recipe and section.get("name") == environment, "what follows the class", must, overrides)
    made = load_object(environment)
    if len(section) > 1:
        made = partial(build, {environment: made}, section, "environment", guarded=False)
    with at_work(f"checking {environment}"):
        problems = check_environment(made, split=split)
        problems += check_rules(section, broken=bool(problems))
    if as_json:
        say_json({"environment": environment, "problems": problems})
    else:
        for problem in problems:
            results.print(f"- {problem}", markup=False, soft_wrap=True)
        if not problems:
            results.print(f"{environment} keeps the contract.", markup=False)
    if problems:
        raise typer.Exit(1)


@command("convert", "smollm2-135m", panel="Prepare")
def convert(
    model: Annotated[str, typer.Argument(help="Name of a bundled model, such as smollm2-135m.")],
) -> None:
    """Convert a bundled model to safetensors."""
    from perturn.chat.model_names import BUNDLED, resolve_model

    check_known(model, BUNDLED, f"no bundled model is named {model!r}")
    with at_work(f"converting {model}"):
        folder = resolve_model(model, notices.print)
    results.print(folder, soft_wrap=True)
