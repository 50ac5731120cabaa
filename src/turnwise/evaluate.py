"""Score policies on one panel of held-out tasks."""

from __future__ import annotations

import dataclasses
import json

from turnwise.stage import choose_tasks, make_jobs, make_protocol, panel_digest, record, world_maker
from turnwise.types import EpisodeProtocol
from turnwise.workspace import Run, write_atomically


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
    protocol = make_protocol(run.recipe.protocol)
    stamp = {
        "name": f"{protocol.name}-{protocol.format}",
        "environment": environment,
        "settings": run.recipe.environment,
        "split": settings.tasks.split,
        "n": len(tasks),
        "panel_sha256": panel_digest(tasks),
        "max_turns": _limits(protocol, {task.kind for task in tasks}),
        "history": "full",
        "decoding": dataclasses.asdict(settings.sampling),
        "seed": run.recipe.seed,
    }
    write_atomically(run.folder / "evaluation" / "protocol.json", json.dumps(stamp, indent=2) + "\n")
    jobs = make_jobs(tasks, run.recipe.seed)
    with run.stage(f"evaluate-{policy}") as counts:
        counts |= record(
            run,
            run.evaluation(policy),
            jobs,
            policy,
            settings.sampling,
            settings.concurrency,
            f"evaluating {policy}",
        )


def _limits(protocol: EpisodeProtocol, kinds: set[str]) -> dict[str, int]:
    return {kind: protocol.max_turns_by_kind.get(kind, protocol.max_turns) for kind in sorted(kinds)}
