"""Check before any work that a recipe with `staleness` has no setting which needs a fixed exploring policy."""

from __future__ import annotations

from collections.abc import Iterator

from perturn.config.compatibility import explorer_name
from perturn.config.recipe import Recipe
from perturn.config.stages import makes, rows_name
from perturn.errors import check_none
from perturn.quantities import wanted
from perturn.quantities.protocol import ACTED, EXPLORER
from perturn.run.served_policy import engine_settings
from perturn.training.credit_choice import make_loss, named_credit


def check_staleness(recipe: Recipe) -> None:
    """Reject a recipe with `staleness` if a part needs a fixed exploring policy, or the engine for itself.

    Raises:
        ConfigError: If the recipe is rejected; names the setting to change.
    """
    check_none(f"staleness is {recipe.staleness}, and {fault}" for fault in _faults(recipe))


def _faults(recipe: Recipe) -> Iterator[str]:
    """Yield messages about settings that do not work with `staleness`."""
    explore, align = recipe.explore, recipe.align
    if recipe.iterations == 1 or align is None or explore is None:
        yield "there is no next iteration to explore meanwhile; set iterations > 1, or staleness=0."
        return
    if explore.rounds:
        yield f"explore.name={explorer_name(recipe)} branches off from episodes; take explore.name=rollouts."
    if not makes(recipe, "groups"):
        yield f"rows.name={rows_name(recipe)} takes no account of the policy that acted; take rows.name=groups."
    elif not make_loss(align.loss, "align.loss").traits.needs_behavior:
        yield (
            f"align.loss.name={align.loss['name']} has no importance weights, which correct for older policies; take "
            "align.loss.name=ppo-clip."
        )
    else:
        yield from _credit_faults(recipe)
    if not engine_settings(recipe).traits.swaps_weights:
        yield (
            f"engine {recipe.engine['name']!r} cannot go over to other weights while it answers; take "
            "engine.name=local or engine.name=vllm."
        )
    for given, key, why in (
        (recipe.deterministic, "deterministic", "when the policy changes depends on timing"),
        (recipe.cluster, "cluster", "nodes serve one policy at a time"),
        (recipe.engine.get("sleep"), "engine.sleep", "the engine answers while a policy is trained"),
        (recipe.user, "user", "the engine of the user answers one play at a time"),
        (recipe.judge, "reward.judge", "the judge takes the place of the engine"),
        (recipe.reward_model, "reward.model", "it learns from episodes of one policy"),
        (
            recipe.evaluate and recipe.evaluate.select,
            "evaluate.select",
            "a selector takes the place of the engine",
        ),
    ):
        if given:
            yield f"{key} is set: {why}; leave it out, or set staleness=0."


def _credit_faults(recipe: Recipe) -> Iterator[str]:
    """Yield messages about quantities of the credit that need a fixed exploring policy or the environment."""
    assert recipe.align is not None
    name, credit = named_credit(recipe.align.loss, recipe.credit)
    for quantity, request in wanted(credit.needs, f"credit {name}").values():
        traits = quantity.traits
        if quantity.policies(request) & {ACTED, EXPLORER} and not traits.features_alone:
            yield (
                f"credit {name} reads the policy that acted, of which there are several; take another, such as "
                "credit.name=rloo."
            )
        if traits.reads_world or traits.reads_branches:
            yield f"credit {name} plays in the environment again; take another, such as credit.name=rloo."
