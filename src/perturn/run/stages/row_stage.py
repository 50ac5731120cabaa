"""Make the training rows of an alignment with the recipe's row maker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from perturn.config.compatibility import unused_faults, warn_of_equal_samples
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import Limit, RowInputs, RowTraits, rows_made, sense_in
from perturn.config.stages import Stage, mark, rows_name
from perturn.data.run_folder import Run
from perturn.data.store import read_pairs, read_records, read_trajectories, write_pairs, write_records
from perturn.display.progress_bars import mention
from perturn.errors import ConfigError, RunError, check_fit, check_none
from perturn.formats.read_rows import rows_of
from perturn.io.read_input import user_path
from perturn.needs import Distance, name_of
from perturn.rows.pairing import pair_within_groups, parting, starting
from perturn.run.protocol_rules import make_protocol
from perturn.run.served_policy import require_weights
from perturn.run.session import Session
from perturn.run.stages.branch_stage import played_on
from perturn.run.stages.measure_distance import corrected, measured, measured_pairs
from perturn.table import locate
from perturn.types import PreferencePair, Task, Trajectory, WeightedTrajectory, failed, succeeded

ROWS_OF = {"pairs": PreferencePair, "single": Trajectory, "labelled": WeightedTrajectory}
"""Classes of the user's own rows, by the kind of rows."""


def make_rows(session: Session, stage: Stage) -> None:
    """Make the training rows of an iteration, print how its episodes were used, and write the rows.

    Raises:
        RunError: If there is nothing to train on, and no later iteration can change this.
    """
    run, recipe = session.run, session.recipe
    assert recipe.rows is not None
    traits = recipe.rows.traits
    grouped = traits.makes == "groups"
    files: Callable[..., Sequence[Path]] = (
        locate("perturn.run.stages.group_stage:files_of") if grouped else _files
    )
    with run.stage(stage.name, *files(run, stage)) as counts:
        inputs = _inputs(session, stage)
        made = rows_made(recipe.rows, inputs)
        counts |= made.counts
        if grouped:
            locate("perturn.run.stages.group_stage:weigh")(session, stage, made, counts)
            return
        rows = list(made.rows)
        said = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count)
        source = f" from {len(inputs.explored)} explored episodes" if inputs.explored else ""
        mention(f"{'pairs' if traits.makes == 'pairs' else 'rows'}: {len(rows)}{source} ({said})")
        whose = " and the expert's" if traits.expert else ""
        if made.lacks and (traits.starts_over or recipe.iterations == 1):
            raise RunError(
                f"rows.name={rows_name(recipe)}: of {len(inputs.explored)} explored trajectories{whose}, {made.lacks}; "
                f"{made.remedy}."
            )
        if made.lacks:
            mention(f"{made.lacks}; {made.remedy}.")
        if traits.makes == "pairs":
            write_pairs(
                _file(run, stage), rows if sense_in(recipe.rows.needs) else measured_pairs(recipe, rows)
            )
        else:
            counts["rows"] = write_records(_file(run, stage), rows)


def prefer(session: Session, stage: Stage) -> None:
    """Make preference pairs from an iteration's explored episodes, for its reward model. There may be no pair."""
    run, settings = session.run, session.recipe.reward_model
    assert settings is not None
    file, played = run.paths.preferences(stage.mark), _explored(run, stage)
    with run.stage(stage.name, file) as counts:
        inputs = RowInputs(limit=_limit(session.recipe))
        fitting = starting(played, inputs)
        found = pair_within_groups(fitting, settings.threshold, per_group=settings.per_group)
        pairs, reasons = parting(found, inputs, each=2)
        reasons["too_long"] += len(played) - len(fitting)
        counts |= reasons
        mention("in pairs:", ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count))
        write_pairs(file, measured_pairs(session.recipe, pairs))


def read_rows(run: Run, stage: Stage) -> list[Any]:
    """Return the rows of an iteration that `make_rows` wrote. Not for groups."""
    file = _file(run, stage)
    pairs = run.recipe.rows is not None and run.recipe.rows.traits.makes == "pairs"
    return list(read_pairs(file) if pairs else read_records(file, WeightedTrajectory))


def expert_episodes(session: Session) -> list[Trajectory]:
    """Return the successful expert episodes for SFT, in the order of its task list, then conversations.

    If the user gave a file of expert episodes, all its successes are returned.

    Raises:
        RunError: If there is no successful episode.
    """
    recipe, file = session.recipe, session.run.paths.trajectories("expert")
    episodes = _successes(session.run)
    if recipe.expert is None or recipe.expert.file is None:
        task_lists = session.task_lists
        order = {task.id: index for index, task in enumerate(task_lists.tasks.get("sft", task_lists.expert))}
        trained = [one for one in episodes if one.task.id in order or not one.environment]
        episodes = sorted(trained, key=lambda one: (one.sample, order.get(one.task.id, len(order))))
    if not episodes:
        raise RunError(f"{file} holds no successful episode to teach.")
    return episodes


def check_made(recipe: Recipe) -> None:
    """Reject unused settings, and row makers that need the whole history or log-probabilities if these are missing."""
    check_none(unused_faults(recipe))
    warn_of_equal_samples(recipe)
    if recipe.rows is None:
        return
    traits = recipe.rows.traits
    if traits.needs_history:
        history = make_protocol(recipe.protocol).history
        must = f"be full, since rows.name={rows_name(recipe)} puts two episodes into one conversation"
        check_fit(history is None, "protocol.history", must, history)
    if traits.reads_logprobs:
        reader = f"rows.name={rows_name(recipe)} reads the log-probabilities of what was sampled"
        require_weights(recipe, reader, "rows.takeover=random")


def check_experts(
    recipe: Recipe, own: Mapping[str, Collection[str]], tasks: Iterable[Task], command: str | None = None
) -> None:
    """Reject a file of expert episodes that can give no pair, since no success in it is on an explored task.

    Args:
        recipe: Recipe of the run.
        own: Ids of the tasks of the user's own rows, by the key of the file; for the expert, of the successes alone.
        tasks: Tasks of `explore.tasks`.
        command: The single command, such as `collect`, which makes no pairs. None: all stages.
    """
    if command is not None or recipe.rows is None or not _pairs_with_expert_alone(recipe.rows.traits):
        return
    shown, explored = own.get("expert.file"), set(own.get("explore.path") or (task.id for task in tasks))
    if shown is None or not explored.isdisjoint(shown):
        return
    if not shown:
        raise ConfigError(
            "expert.file: no row is a success with a task; set `success: true` in the successes (conversations have no "
            "task and make no pairs)."
        )
    if explored:
        raise ConfigError(
            f"expert.file: no success is on an explored task, so rows.name={rows_name(recipe)} can make no pair. Tasks "
            f"of its successes are such as {min(shown)!r:.80}; explored tasks are such as {min(explored)!r:.80}. "
            "Compare the task ids."
        )


def _pairs_with_expert_alone(traits: RowTraits) -> bool:
    """Return whether each pair of explored episodes has an expert's episode on its other side.

    A row maker that reads several samples, corrections or other branches can also pair the policy's own episodes.
    """
    own = traits.several_samples or traits.corrects or traits.branches - {"expert-branches"}
    return traits.makes == "pairs" and traits.explored and traits.expert and not own


def _inputs(session: Session, stage: Stage) -> RowInputs:
    """Return the inputs of the recipe's row maker that its traits ask for."""
    run, recipe = session.run, session.recipe
    assert recipe.rows is not None
    traits, alone = recipe.rows.traits, recipe.rows.traits.makes in ("single", "labelled")
    explored = _explored(run, stage) if traits.explored else []
    given: Sequence[Any] = ()
    if traits.source is not None:
        given = list(rows_of(user_path(traits.source, "rows.path"), ROWS_OF[traits.makes]))
    sense = sense_in(recipe.rows.needs)
    branches: Sequence[Trajectory] = ()
    if traits.makes == "groups":
        branches = locate("perturn.run.stages.group_stage:trained_branches")(run, stage.mark)
    elif traits.branches:
        branches = list(read_trajectories(run.paths.trajectories(f"branch{stage.mark}")))
    return RowInputs(
        explored=explored,
        experts=_experts(run) if traits.expert else (),
        sft_episodes=expert_episodes(session) if traits.expert and alone else (),
        branches=branches,
        begun=played_on(session, explored) if traits.branches else (),
        earlier=_earlier(run, stage) if traits.aggregates else (),
        given=given,
        quantities=_quantities(session, stage, [one for one in explored if not failed(one)]),
        seed=recipe.seed,
        limit=_limit(recipe),
        measure=list if sense is None else partial(measured, recipe),
        correct=partial(corrected, recipe),
    )


def _quantities(
    session: Session, stage: Stage, ended: Sequence[Trajectory]
) -> dict[str, dict[tuple[str, int], Any]]:
    """Return the quantities that a row maker needs, except the distance, by name and by key of an episode."""
    rows = session.recipe.rows
    assert rows is not None
    needs = [need for need in rows.needs if name_of(need) != Distance.name]
    if not needs:
        return {}
    read, reader = (
        locate("perturn.run.stages.quantity_source:read_needs"),
        f"rows.name={rows_name(session.recipe)}",
    )
    found: dict[str, Sequence[Any]] = read(session, stage, ended, needs, reader)
    return {
        name: {one.key: entry for one, entry in zip(ended, entries, strict=True)}
        for name, entries in found.items()
    }


def _explored(run: Run, stage: Stage) -> list[Trajectory]:
    """Return the explored episodes of an iteration, sorted by key, since the order in the file depends on timing."""
    found = read_trajectories(run.paths.trajectories(f"explore{stage.mark}"))
    return sorted(found, key=lambda one: one.key)


def _experts(run: Run) -> list[Trajectory]:
    """Return the successful expert episodes, sorted by key unless they come from the user's `expert.file`."""
    found, expert = _successes(run), run.recipe.expert
    return found if expert is not None and expert.file is not None else sorted(found, key=lambda one: one.key)


def _successes(run: Run) -> list[Trajectory]:
    """Return the successful expert episodes."""
    return [one for one in read_trajectories(run.paths.trajectories("expert")) if succeeded(one)]


def _earlier(run: Run, stage: Stage) -> list[WeightedTrajectory]:
    """Return the rows of the previous iteration, which include the rows of all iterations before it."""
    if stage.iteration == 1:
        return []
    before = run.paths.outcomes(mark(run.recipe, stage.iteration - 1))
    return list(read_records(before, WeightedTrajectory))


def _limit(recipe: Recipe) -> Limit:
    """Return the length limit of training. The tokenizer is loaded once, when it is first needed."""
    limit = cache(lambda: locate("perturn.run.stages.group_stage:LengthLimit")(recipe))
    return Limit(
        too_long=lambda episodes: limit().too_long(episodes),
        whole=lambda one: limit().whole(one),
        equal=lambda pairs: limit().equal(pairs),
    )


def _files(run: Run, stage: Stage) -> tuple[Path]:
    return (_file(run, stage),)


def _file(run: Run, stage: Stage) -> Path:
    """Return the path of an iteration's rows. Not for groups."""
    assert run.recipe.rows is not None
    pairs = run.recipe.rows.traits.makes == "pairs"
    return run.paths.pairs(stage.mark) if pairs else run.paths.outcomes(stage.mark)
