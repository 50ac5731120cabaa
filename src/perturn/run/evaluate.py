"""Score policies on one panel of held-out tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from perturn.data.run_folder import Run
from perturn.episodes.prompts import system_prompt
from perturn.io.writing import write_whole
from perturn.run.session import (
    choose_tasks,
    evaluation_sampling,
    make_jobs,
    make_protocol,
    panel_digest,
    record,
    world_maker,
)
from perturn.types import EpisodeProtocol, Sampling


def evaluate(run: Run, policy: str) -> None:
    """Play the evaluation panel with a policy and stamp the protocol.

    Args:
        run: The run.
        policy: `base`, or the name of a trained checkpoint.
    """
    settings = run.recipe.evaluate
    env = world_maker(run.recipe)()
    try:
        tasks = choose_tasks(env, settings.tasks)
        environment = env.name
    finally:
        env.close()
    protocol, sampling = make_protocol(run.recipe.protocol), evaluation_sampling(run.recipe)
    stamp = {
        "environment": environment,
        "settings": run.recipe.environment,
        "split": settings.tasks.split,
        "n": len(tasks),
        "panel_sha256": panel_digest(tasks),
        **_rules(protocol, {task.kind for task in tasks}),
        "decoding": dataclasses.asdict(sampling),
        "departures": _departures(protocol, sampling),
        "seed": run.recipe.seed,
    }
    jobs = make_jobs(tasks, run.recipe.seed)
    with run.stage(f"evaluate-{policy}", run.evaluation(policy)) as counts:
        write_whole(run.folder / "evaluation" / "protocol.json", json.dumps(stamp, indent=2) + "\n")
        counts |= record(
            run,
            run.evaluation(policy),
            jobs,
            policy,
            sampling,
            settings.concurrency,
            f"evaluating {policy}",
        )


def _rules(protocol: EpisodeProtocol, kinds: set[str]) -> dict[str, Any]:
    """The parts of a protocol that must be equal before two scores are compared."""
    prompt = json.dumps(system_prompt(protocol), sort_keys=True)
    return {
        "name": f"{protocol.name}-{protocol.format}",
        "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
        "max_turns": {
            kind: protocol.max_turns_by_kind.get(kind, protocol.max_turns) for kind in sorted(kinds)
        },
        "history": "full" if protocol.history is None else protocol.history,
        "list_admissible": protocol.list_admissible,
    }


def _departures(protocol: EpisodeProtocol, sampling: Sampling) -> dict[str, dict[str, float]]:
    """Settings of decoding in which a run is not its protocol, with both values."""
    if protocol.sampling is None:
        return {}
    theirs, ours = dataclasses.asdict(protocol.sampling), dataclasses.asdict(sampling)
    return {
        name: {"protocol": theirs[name], "here": value}
        for name, value in ours.items()
        if value != theirs[name]
    }
