"""Explorers without a run: the rounds that resume episodes, with policies and worlds that are objects."""

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
from perturn.explore.protocol import ExploreInputs
from perturn.needs import Distance
from perturn.quantities import compute, wanted
from perturn.quantities.protocol import ACTED
from perturn.quantities.readers import Models, Reader
from perturn.types import Trajectory, failed, succeeded


def make_explorer(explore: str | Section | Explorer, samples: int, concurrency: int) -> Explorer:
    """Return the explorer of a call.

    Raises:
        ConfigError: If there is none of that name, a setting is wrong, or it needs a run.
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
    in_a_run = "use `perturn explore` and `perturn branch`"
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
    """Play the episodes that an explorer asks for after the rollouts, as the stage `branch` of a run does.

    Args:
        explorer: That asks.
        inputs: Their `explored` are the rollouts.
        experts: The expert's episodes, for an explorer that reads them.
        open_policy: Opens the policy that explored, for an explorer that reads it.
        play: Plays episodes.

    Returns:
        The episodes of all rounds, in their order.
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
        found += play(explorer.jobs(replace(inputs, played=list(found)), number))
    return found
