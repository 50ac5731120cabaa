"""Adapter for tasksets and harnesses of verifiers 0.4. A source is the path of a TOML configuration of `vf-eval`.

The configuration names the taskset, harness, environment and runtime. Their modules may be in its folder. The key
`select` chooses the tasks. `client`, `model` and `sampling` are ignored, since the policy answers.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:
    _found = version("verifiers")
except PackageNotFoundError:
    sys.exit("verifiers is not installed; run: pip install 'verifiers==0.4.*'")
if not _found.startswith("0.4."):
    sys.exit(
        f"this adapter is for verifiers 0.4, and {_found} is installed; run: pip install 'verifiers==0.4.*'"
    )

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment, load_taskset


def tasks(source: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks that a configuration selects."""
    config = _config(source)
    for task in load_taskset(config.env.taskset).select(config.select):
        row = task.data.model_dump(mode="json")
        yield {
            "id": f"{config.env.env_id}/{row['id'] or row['idx']}",
            "kind": row["name"] or "",
            "source": source,
            "row": row,
        }


async def rollout(task: dict[str, Any], client: Any) -> dict[str, Any]:
    """Run one episode of verifiers' environment; return the mean reward of its trainable agents."""
    config = _config(task["source"])
    context = ModelContext(
        model="policy",
        client=EvalClientConfig(base_url=str(client.base_url), api_key_var="OPENAI_API_KEY"),
        sampling=config.sampling,
    )
    env = load_environment(config.env)
    kind = type(env.taskset).task_type()
    made = kind(kind.data_type().model_validate(task["row"]), env.config.taskset.task)
    async with env.serving():
        episode = await env.run_episode(made, context)
    ours = [trace for trace in episode.traces if trace.agent.trainable]
    _check(episode.errors, ours)
    rewards = [trace.reward for trace in ours]
    return {"reward": sum(rewards) / len(rewards)}


def _config(source: str) -> EvalConfig:
    """Read a configuration, and put its folder on `sys.path` and `PYTHONPATH`, so that tool servers find it too."""
    folder = str(Path(source).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        others = filter(None, (os.environ.get("PYTHONPATH"),))
        os.environ["PYTHONPATH"] = os.pathsep.join((folder, *others))
    return EvalConfig.model_validate(tomllib.loads(Path(source).read_text(encoding="utf-8")))


def _check(errors: list[Any], traces: list[vf.Trace]) -> None:
    """Exit with an error if verifiers reports one or ran no trainable agent; the episode is then FAILED."""
    wrong = [*errors, *(each.last_error for each in traces if not each.ok)]
    if wrong or not traces:
        said = wrong[-1] if wrong else None
        sys.exit(f"{said.type}: {said.message}" if said else "verifiers ran no agent that the policy answers")
