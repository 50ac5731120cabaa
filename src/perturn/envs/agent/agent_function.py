"""A program that runs functions of the user's: it lists tasks, or forks a process for each episode.

It is started by its path, in the interpreter that the functions need. So it uses the standard library and OpenAI's
client alone, and nothing of Perturn. The module of the functions is imported once, and the process that is forked plays
nothing itself.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

_DIE_WITH_PARENT = Path(__file__).parents[1] / "die_with_parent.py"


def main(job: str, folders: str, name: str, *given: str) -> None:
    """List tasks, or play episodes.

    Args:
        job: `list` or `serve`.
        folders: JSON of the folders to import from; null: the folders of this interpreter, and the current folder.
        name: Of the function, as `module:rollout` or `file.py:rollout`.
        *given: Sources of tasks, or descriptors.
    """
    sys.path[:] = json.loads(folders) or ["", *sys.path[1:]]
    module, _, attribute = name.partition(":")
    if job == "list":
        _list(module, attribute, given)
    else:
        _serve(name, getattr(_load(module), attribute), *map(int, given))


def _list(module: str, attribute: str, sources: tuple[str, ...]) -> None:
    """Print the rows of each source as one line of JSON."""
    loaded = _load(module)
    if not hasattr(loaded, attribute):
        sys.exit(f"{module} has no function {attribute!r}")
    print(f"\n{json.dumps({source: list(loaded.tasks(source)) for source in sources})}", flush=True)


def _serve(name: str, rollout: Any, control: int, lifeline: int) -> None:
    """Fork for each order, until the other side hangs up.

    Args:
        name: Of the function.
        rollout: The function.
        control: Descriptor of the socket that orders come from.
        lifeline: Descriptor that ends with the parent.
    """
    import openai  # noqa: F401  once, and not in each fork

    _module(_DIE_WITH_PARENT).die_with_parent(lifeline)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that ended are reaped
    orders = socket.socket(fileno=control)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 4096, 5)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            os.close(lifeline)
            _play(name, rollout, order.decode(), descriptors)
        for each in descriptors:
            os.close(each)
        orders.send(str(pid).encode())


def _play(name: str, rollout: Any, order: str, descriptors: list[int]) -> None:
    """Play one episode in a fork, and end it."""
    code = 1
    *streams, lifeline, status = descriptors
    parent = _module(_DIE_WITH_PARENT)
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, each in enumerate(streams):
            os.dup2(each, target)
            os.close(each)
        parent.die_with_parent(lifeline)
        parent.adopt_orphans()
        with open(order, encoding="utf-8") as file:
            said = json.load(file)
        if memory := said["memory"]:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        os.environ.clear()
        os.environ.update(said["variables"])
        task = json.load(sys.stdin)
        _seed(task["seed"])
        print(f"\n{json.dumps(asyncio.run(_rollout(name, rollout, task)))}", flush=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr, flush=True)
    except BaseException:  # noqa: BLE001  an agent is code of others; the episode says how it ended
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        parent.kill_descendants()
        os.write(status, str(code).encode())
        os._exit(code)


async def _rollout(name: str, rollout: Any, task: dict[str, Any]) -> object:
    from openai import AsyncOpenAI

    if not inspect.iscoroutinefunction(rollout):
        sys.exit(f"{name} must be `async def rollout(task, client)`, got {rollout!r:.80}.")
    async with AsyncOpenAI() as client:
        found: object = await rollout(task, client)
        return found


def _seed(seed: int) -> None:
    """Seed the generators that all forks would else have in one state."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _load(module: str) -> ModuleType:
    """Import a module by its dotted name or by its file, whose folder is then searched too."""
    if module.endswith(".py"):
        file = Path(os.path.abspath(module))
        sys.path.insert(0, str(file.parent))
        return _module(file)
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(module)


def _module(file: Path) -> ModuleType:
    """Import a file; if its name is the name of a loaded module, it gets another name."""
    name = f"{file.stem}@{file.parent}" if file.stem in sys.modules else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
