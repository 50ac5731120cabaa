"""The rows of an alignment on single episodes, by how they ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perturn.data.run_folder import base_of
from perturn.data.store import read_records, read_trajectories, write_records
from perturn.errors import ConfigError, RunError
from perturn.run.correct import taken_over
from perturn.run.labelled import ROWS, divide, lacking
from perturn.run.progress import mention
from perturn.run.session import Session, engine_settings, make_protocol, make_renderer
from perturn.settings.recipe import Recipe
from perturn.settings.stages import Stage, mark
from perturn.table import locate
from perturn.types import Trajectory, WeightedTrajectory, succeeded


def make_rows(session: Session, stage: Stage) -> None:
    """Make the rows of an alignment from the expert's episodes and those that the policy has explored.

    Raises:
        RunError: If what the way learns from is not there, and is not hoped for in a later iteration.
    """
    run, settings = session.run, session.recipe.outcomes
    assert settings is not None
    # Sorted, since they are stored as they end, which depends on timing.
    explored = sorted(
        read_trajectories(run.paths.trajectories(f"explore{stage.mark}")), key=lambda one: one.key
    )
    with run.stage(stage.name, run.paths.outcomes(stage.mark)) as counts:
        shown = [one for one in read_trajectories(run.paths.trajectories("expert")) if succeeded(one)]
        divided, fates = divide(expert_episodes(session), shown, explored, settings.way)
        counts |= {"taught": len(divided.taught), "expert": len(divided.experts), **fates}
        if settings.way.corrected:
            mended = taken_over(session.recipe, divided.failures, settings)
            counts["corrections"] = len(mended)
            divided = replace(divided, corrections=[*_earlier_corrections(session, stage), *mended])
        mention("episodes:", ", ".join(f"{name} {count}" for name, count in counts.items() if count))
        lacks = lacking(divided, settings.way)
        if lacks and (settings.way.anew or session.recipe.iterations == 1):
            raise RunError(
                f"of {len(explored)} explored trajectories and the expert's, {lacks}; explore more tasks, or take a "
                "higher temperature."
            )
        fitting = replace(divided, fits=_limit(session.recipe))
        rows = [] if lacks else ROWS[settings.name](fitting, settings)
        counts["rows"] = write_records(run.paths.outcomes(stage.mark), rows)


def _earlier_corrections(session: Session, stage: Stage) -> list[Trajectory]:
    """The corrections of all earlier iterations, which the rows of the last one hold."""
    if stage.iteration == 1:
        return []
    before = session.run.paths.outcomes(mark(session.recipe, stage.iteration - 1))
    rows = read_records(before, WeightedTrajectory)
    return [row.trajectory for row in rows if row.weight[0] == 0]  # the policy's own turn


def _limit(recipe: Recipe) -> Callable[[Trajectory], bool]:
    """Whether a trajectory fits the length limit of training whole."""
    models, model = "perturn.policy.models", base_of(recipe)
    limit = recipe.model.max_length or locate(f"{models}:context_length")(
        locate(f"{models}:empty_model")(model)
    )
    renderer = make_renderer(recipe, model)
    return lambda one: limit is None or renderer.encode(one).longest <= limit


def check_outcomes(recipe: Recipe) -> None:
    """Refuse two episodes in one conversation where a policy sees only the end of one, and confidence that nobody says.

    Raises:
        ConfigError: Saying what to set.
    """
    settings = recipe.outcomes
    if settings is None:
        return
    if settings.name == "coh" and make_protocol(recipe.protocol).history is not None:
        raise ConfigError(
            "outcomes coh puts two episodes into one conversation, of which a policy must see all; set "
            "protocol.history=full."
        )
    if settings.takeover == "confidence" and not engine_settings(recipe).traits.serves_checkpoints:
        raise ConfigError(
            "outcomes.takeover=confidence reads the log-probabilities of what was sampled, which engine "
            f"{recipe.engine['name']!r} does not give; take random, or engine.name=local."
        )


def read_rows(session: Session, stage: Stage) -> list[WeightedTrajectory]:
    """The rows of an alignment, as `make_rows` made them."""
    return list(read_records(session.run.paths.outcomes(stage.mark), WeightedTrajectory))


def expert_episodes(session: Session) -> list[Trajectory]:
    """The expert's successful episodes, in the order of SFT's panel, then conversations; of the user's file, all.

    Raises:
        RunError: If there is none.
    """
    recipe, file = session.recipe, session.run.paths.trajectories("expert")
    episodes = [one for one in read_trajectories(file) if succeeded(one)]
    if recipe.expert is None or recipe.expert.file is None:
        panels = session.panels
        order = {task.id: index for index, task in enumerate(panels.tasks.get("sft", panels.expert))}
        taught = [one for one in episodes if one.task.id in order or not one.environment]
        episodes = sorted(taught, key=lambda one: (one.sample, order.get(one.task.id, len(order))))
    if not episodes:
        raise RunError(f"{file} holds no successful episode to teach.")
    return episodes
