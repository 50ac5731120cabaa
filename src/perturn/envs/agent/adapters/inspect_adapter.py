"""Adapter for tasks of inspect-ai. A source is `file.py@task`, as for `inspect eval`, or `file.py@task#score`.

Inspect runs the task's solver and scorer on one sample, with the policy as the model. The reward is the value of the
named score, or of the first score, converted to a number as Inspect's metrics do.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:
    _found = version("inspect-ai")
except PackageNotFoundError:
    sys.exit("inspect-ai is not installed; run: pip install 'inspect-ai>=0.3.285,<0.4' openai")
if tuple(map(int, _found.split(".")[:2])) != (0, 3) or int(_found.split(".")[2]) < 285:
    sys.exit(f"this adapter is for inspect-ai 0.3.285 and later releases of 0.3, and {_found} is installed.")

from inspect_ai import Task, eval_async, task_with
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float


def tasks(source: str) -> Iterator[dict[str, Any]]:
    """Yield one task for each sample of an Inspect task."""
    name = source.rpartition("@")[2].partition("#")[0]
    for key in _samples(_task(source)):
        yield {"id": f"{name}/{key}", "source": source, "sample": key}


async def rollout(task: dict[str, Any], client: Any) -> dict[str, Any]:
    """Evaluate one sample and return its score as the reward."""
    whole = _task(task["source"])
    one = task_with(whole, dataset=MemoryDataset([_samples(whole)[task["sample"]]]))
    model = get_model(
        "openai-api/policy/policy", base_url=str(client.base_url), api_key=client.api_key, memoize=False
    )
    with tempfile.TemporaryDirectory() as folder:  # Inspect reads the samples of a log from the log's file
        (log,) = await eval_async(
            one, model=model, log_dir=folder, epochs=1, fail_on_error=True, log_realtime=False
        )
        if log.status != "success" or not log.samples:
            sys.exit(log.error.message if log.error else f"inspect ended with status {log.status}")
        return {"reward": _reward(log.samples[0].scores or {}, task["source"].partition("#")[2])}


def _reward(scores: dict[str, Any], wanted: str) -> float:
    """Return the value of a score; a score with several values is looked up by the key of the value."""
    values = {key: score.value for key, score in scores.items()}
    for key, value in list(values.items()):
        values |= {each: value[each] for each in value} if isinstance(value, dict) else {key: value}
    name = wanted or next(iter(values), "")
    if name not in values or isinstance(values[name], dict | list):
        known = ", ".join(key for key, value in values.items() if not isinstance(value, dict | list))
        sys.exit(f"the task gives no score {name!r} that is one value; name one of {known or 'none'} after #")
    return float(value_to_float()(values[name]))


def _samples(task: Task) -> dict[str, Sample]:
    """Return the samples by id; samples without an id are numbered from 1, as Inspect does."""
    for number, sample in enumerate(task.dataset):
        sample.id = number + 1 if sample.id is None else sample.id
    return {str(sample.id): sample for sample in task.dataset}


def _task(source: str) -> Task:
    """Import the file of a source and call its function that makes the task."""
    file, _, name = source.partition("#")[0].rpartition("@")
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Task = getattr(module, name)()
    return made
