"""Check before any work that the training backend provides what the other parts of a recipe need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perturn.backends import BACKENDS
from perturn.backends.protocol import PROVIDED
from perturn.config.compatibility import explorer_name
from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.stages import keeps_adapters, rows_name
from perturn.engines import ENGINES
from perturn.errors import check_none
from perturn.losses.token_inputs import token_inputs
from perturn.quantities import wanted
from perturn.run.checkpoint_retention import goes_on
from perturn.run.served_policy import engine_settings
from perturn.run.session import backend_settings
from perturn.run.stages.training_checks import trainings_of
from perturn.table import at_defaults
from perturn.training.credit_choice import choose_credit, make_loss


def check_backend(recipe: Recipe) -> None:
    """Check that the backend provides all needs and can be opened, and that the engine can read its policies.

    Raises:
        PerturnError: If a check fails; names what is missing.
    """
    backend, name = backend_settings(recipe), recipe.backend["name"]
    lacks = set(PROVIDED) - backend.traits.provides
    others = {each: _providers(each) for each in lacks}
    check_none(
        f"{reader} needs {PROVIDED[need]}, and backend.name={name} has none; backends that do: "
        f"{', '.join(others[need])}."
        for reader, need in _needs(recipe)
        if need in lacks
    )
    engine = engine_settings(recipe).traits
    if engine.serves_checkpoints:
        check_none(_misread(recipe, engine.reads, backend.traits.stores))
    check_none(_stuck(recipe))
    if engine.takes_models:
        check_none(
            f"engine.handover={recipe.engine['handover']}: {fault}" for fault in _not_in_memory(recipe)
        )
    backend.check(trainings_of(recipe), recipe.model.name, goes_on(recipe))


def _stuck(recipe: Recipe) -> Iterator[str]:
    """Yield messages about adapters that cannot be trained with one optimizer across iterations."""
    if not goes_on(recipe) or recipe.align is None or recipe.align.lora is None:
        return
    remedy = "leave align.minibatches out, or train all weights."
    if not keeps_adapters(recipe, "align"):
        yield f"align.lora: these rows teach the tokenizer words, so adapters are merged and cannot go on; {remedy}"
    if recipe.launch.sharding != "none":
        yield f"align.lora: adapters cannot go on with launch.sharding={recipe.launch.sharding}; {remedy}"


def _not_in_memory(recipe: Recipe) -> Iterator[str]:
    """Yield messages about settings that prevent passing a trained policy to the engine in memory."""
    remedy = "leave engine.handover out, and the weights are read from files."
    for given, key, why in (
        (recipe.staleness, "staleness", "the engine answers while a policy is trained"),
        (recipe.launch.processes > 1, "launch.processes", "the policy is trained in other processes"),
        (
            recipe.align and recipe.align.lora,
            "align.lora",
            "adapters are small files, which the engine reads",
        ),
        (recipe.cluster and recipe.cluster.engines, "cluster.engines", "engines on nodes read files"),
    ):
        if given:
            yield f"{key} is set, and {why}; {remedy}"


def _misread(recipe: Recipe, reads: str, stores: str) -> Iterator[str]:
    """Yield a message if the engine cannot read the policies that the backend stores."""
    if reads == stores:
        return
    fitting = [name for name, entry in ENGINES.items() if _reads(entry) == stores]
    yield (
        f"engine.name={recipe.engine['name']} reads policies as {reads}, and backend.name={recipe.backend['name']} "
        f"keeps them as {stores}; engines that read these: {', '.join(fitting)}."
    )


def _reads(entry: Any) -> str | None:
    """Return the form in which an engine reads policies; None if it reads none or its traits depend on settings."""
    made = at_defaults(entry)
    whole = entry if made is None else made
    traits = whole.traits
    return None if isinstance(traits, property) or not traits.serves_checkpoints else str(traits.reads)


def _providers(need: str) -> list[str]:
    """Return the names of the backends that provide a need."""
    return [name for name, entry in BACKENDS.items() if need in entry.traits.provides]  # type: ignore[attr-defined]


def _needs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield `(part, need)` for each need of a recipe's part that a backend may lack."""
    for name, settings in trainings_of(recipe).items():
        loss = make_loss(settings.loss, f"{name}.loss")
        which = f"{name}.loss.name={settings.loss['name']}"
        for each in token_inputs(loss.traits.reads).values():
            yield which, "models" if each.traits.policy else "token-inputs"
        if settings.lora is None:
            yield name, "all-weights"
        credit = choose_credit(loss, settings.loss, recipe.credit if name == "align" else None)
        for need, (quantity, request) in wanted(credit.needs).items():
            if quantity.policies(request) and not quantity.traits.of_rows:
                yield f"{name}: what its credit reads ({need})", "models"
    for part, named, section in (
        ("explore", explorer_name, recipe.explore),
        ("rows", rows_name, recipe.rows),
    ):
        if section is not None:
            for need, (quantity, request) in wanted(section.needs, f"{part}.name={named(recipe)}").items():
                if quantity.policies(request):
                    yield f"{part}: what it reads ({need})", "models"
    if recipe.launch.processes > 1:
        yield "launch.processes", "models"
    if recipe.base is not None:
        yield "base", "models"
    if recipe.reward_model is not None:
        yield REWARD_MODEL, "models"
    if recipe.rows is not None and recipe.rows.traits.suffixes:
        yield "rows (a tokenizer that learns words)", "models"
    if recipe.align is not None and recipe.align.reference == "average":
        yield "align.reference=average", "models"
    if recipe.evaluate is not None and not recipe.evaluate.needs.isdisjoint(("policy", "start")):
        yield "evaluate.select", "models"
