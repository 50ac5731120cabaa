"""Adapters: files that play the tasks of another library in the interpreter which has it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from perturn.envs.agent.agent_launch import function_program
from perturn.envs.world_process import without_secrets
from perturn.errors import ConfigError, check_known, within

_FOLDER = Path(__file__).with_name("adapters")
ADAPTERS: Mapping[str, str] = {
    name: str(_FOLDER / f"{name}_adapter.py") for name in ("inspect", "openenv", "verifiers")
}
"""Files by the name that recipes use. Each has `tasks(source)` and `async rollout(task, client)`."""
_LIST_S = 600.0
"""Seconds that a library may take to list its tasks."""


def adapter_file(name: str) -> str:
    """Return the file of an adapter: of a name, or a file of the user's own.

    Raises:
        ConfigError: If there is no such adapter.
    """
    if name.endswith(".py") and Path(name).is_file():
        return name
    check_known(name, ADAPTERS, f"environment.adapter={name!r} is neither an adapter nor a file")
    return ADAPTERS[name]


@cache
def adapted_rows(
    python: str | None, name: str, sources: tuple[str, ...], passed: tuple[str, ...]
) -> Mapping[str, Sequence[Any]]:
    """Return the rows of each source, as `tasks` next to a function lists them; without sources, only import it.

    Args:
        python: Interpreter; None: this one.
        name: Of the function, as `file.py:rollout`.
        sources: What `tasks` is called with.
        passed: Variables of this process with secrets that the interpreter gets.

    Raises:
        ConfigError: If the function cannot be imported, or tasks cannot be listed.
    """
    command = function_program("list", python, name, *sources)
    with within(f"environment: {name} cannot be asked for its tasks: ", OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIST_S,
            env=without_secrets(os.environ, passed),
            check=False,
        )
    if ended.returncode:
        said = [line for line in ended.stderr.decode(errors="replace").splitlines() if line.strip()]
        raise ConfigError(
            f"environment: {name} cannot be used in {command[0]}: {said[-1].strip() if said else 'it ended'}"
        )
    rows: Mapping[str, Sequence[Any]] = json.loads(ended.stdout.decode().splitlines()[-1])
    return rows
