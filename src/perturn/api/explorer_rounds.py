"""Explorers without a run folder: make an explorer for `collect`, and play its rounds of branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from perturn.config.explorer_settings import EXPLORER, ExploreSettings
from perturn.config.parsing import build_entry, section_of
from perturn.config.sections import Section
from perturn.data.origins import best_by_task
from perturn.episodes.episode import Job
from perturn.errors import ConfigError, check_belongs, check_provided
from perturn.explore import Explorer
from perturn.explore.protocol import ExploreInputs, jobs_of
from perturn.needs import Distance
from perturn.quantities import compute, wanted
from perturn.quantities.protocol import ACTED
from perturn.quantities.readers import Models, Reader
from perturn.types import Trajectory, failed, succeeded


def make_explorer(explore: str | Section | Explorer, samples: int, concurrency: int) -> Explorer:
    """Return the explorer for a call of `collect`.

    Args:
        explore: Explorer, name of an explorer, or section `explore`.
        samples: Number of episodes per task.
        concurrency: Number of episodes played at the same time.

    Raises:
        ConfigError: If the explorer is unknown, a setting is wrong, or the explorer needs a run folder.
    """
    own = {"samples": samples, "concurrency": concurrency}
    if isinstance(explore, Explorer):
        explorer = replace(explore, samples=samples, concurrency=concurrency)
    else:
        section = section_of(explore, "explore")
        common = {f"explore.{each.name}": True for each in fields(ExploreSettings) if each.name in section}
        check_belongs(common, False, "collect itself", "give collect its arguments of these names")
        explorer = build_entry(EXPLORER, {**section, **own}, "explore")
    name = type(explorer).__name__
    in_a_run = "use `perturn collect` with a recipe"
    if explorer.traits.policy is not None:
        raise ConfigError(
            f"explorer {name} plays with policy {explorer.traits.policy!r} of a run, and collect has no run; leave out "
            f"explore.policy, or {in_a_run}."
        )
    found = wanted(explorer.needs, f"explorer {name}").items()
    elsewhere = [
        key
        for key, (one, _) in found
        if key == Distance.name or one.traits.reads_world or one.traits.reads_branches
    ]
    check_provided(f"explorer {name}", elsewhere, (), "collect", in_a_run)
    return explorer


def play_rounds(
    explorer: Explorer,
    inputs: ExploreInputs,
    experts: Sequence[Trajectory],
    open_policy: Callable[[], Reader],
    play: Callable[[Sequence[Job]], list[Trajectory]],
) -> list[Trajectory]:
    """Play the rounds of branches of an explorer, as the stage `branch` of a run does.

    Args:
        explorer: The explorer.
        inputs: Inputs of the explorer, with the rollouts in `explored`.
        experts: The expert's episodes, for an explorer that reads them.
        open_policy: Function that loads the policy, for an explorer that reads its weights.
        play: Function that plays jobs and returns their episodes.

    Returns:
        Episodes of all rounds, in the order of rounds and jobs.
    """
    tasks = {one.task.id for one in inputs.explored}
    best = best_by_task(one for one in experts if succeeded(one) and one.task.id in tasks)
    begun = explorer.begun(inputs.explored, list(best.values()))
    inputs = replace(
        inputs,
        explored=sorted((one for one in inputs.explored if not failed(one)), key=lambda one: one.key),
        begun=sorted(begun, key=lambda one: one.key),
    )
    read: Mapping[str, Sequence[Any]] = {}
    if explorer.needs:
        source = Models({ACTED: open_policy()})
        read = {name: one.entries for name, one in compute(explorer.needs, inputs.explored, source).items()}
    inputs = replace(inputs, chosen=explorer.choose(replace(inputs, read=read)))
    found: list[Trajectory] = []
    for number in range(1, explorer.rounds + 1):
        found += play(jobs_of(explorer, replace(inputs, played=list(found)), number))
    return found
