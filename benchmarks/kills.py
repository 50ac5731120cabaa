"""Kill random processes of a run at random moments with SIGKILL, and repeat the command until the run ends.

    python benchmarks/kills.py --place FOLDER --kills 200 --out benchmarks/kills.jsonl

A trial is one run that is killed several times. Its result is compared with a run of the same recipe without kills.
`--out` has a line for each trial, so that a second call continues the benchmark. `--table` prints a table of these
lines. Commands are forked from a process that has imported the modules of a run, so that they start quickly.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import kill_endpoint
from free_port import free_port
from kill_commands import Command, temporary_of
from kill_settings import ROLES, SETTINGS, Setting, differences, prepare, roles_of

_LONGEST = 400.0
"""Time after which a command counts as hanging, in seconds."""
NAMES = [*SETTINGS, kill_endpoint.NAME]
"""Names of the settings that can be killed."""
_ANY_TIME = 0.3
"""Share of the kills at a random time of the command. All others are within a random stage."""
_DRIVER = 0.35
"""Share of the kills that hit the process of the command, if there are other processes."""
_ENDS = {"Ray head": {1, 2}, "Ray node": {1, 2}}
"""Allowed exit codes of a command after a process of a role was killed, for roles that allow more than 2. Ray itself
may end the command, with 1, if the head is lost while the command connects, or if the node of its machine is lost."""
_IMPORTED = [
    "perturn.cli",
    "perturn.run.execute",
    "perturn.run.stages.train_stage",
    "perturn.engines.local.engine",
    "perturn.report.report_page",
    "accelerate",
]


class Trials:
    """Runs in one folder that are killed."""

    def __init__(self, place: Path, roles: Collection[str] = ()) -> None:
        """Prepare a folder. If roles are given, only processes with these roles are killed."""
        self.place, self.roles = place, roles
        prepare(place)
        (place / "logs").mkdir(exist_ok=True)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)
        first = self._context.Process(
            target=time.sleep, args=(0,)
        )  # otherwise its imports would count for the first command
        first.start()
        first.join()
        self._ports: dict[str, int] = {}

    def start(self, setting: Setting, name: str) -> Command:
        """Start the command of a setting."""
        words = [*setting.words, f"name={name}"]
        if not setting.named:
            words = [words[0], f"runs/{name}", *words[1:-1]]
        if setting.served:
            words.append(
                f"engine={{name: api, base_url: '{self.url(name)}/v1', api_key_env: PERTURN_API_KEY}}"
            )
        return Command(self._context, words, self.place, name, setting.pause)

    def url(self, name: str) -> str:
        """Return the address of a trial's server."""
        if name not in self._ports:
            self._ports[name] = free_port()
        return f"http://127.0.0.1:{self._ports[name]}"

    def server(self, name: str, *words: str) -> Command:
        """Start the server of a trial."""
        port = self.url(name).rpartition(":")[2]
        return Command(
            self._context, ["serve", "tiny", "--port", port, *words], self.place, f"{name}-server", 0.0
        )

    def begin(self, setting: Setting, name: str) -> None:
        """Run the setting's earlier command, if it has one."""
        if setting.before:
            first = Command(self._context, [*setting.before, f"name={name}"], self.place, name, 0.0)
            if first.wait(_LONGEST) != 0:
                raise SystemExit(f"{setting.name}: the first command failed; see {first.log}")

    def whole(self, setting: Setting) -> tuple[Path, float]:
        """Return the run without kills, and the seconds of its command."""
        name = f"whole-{_plain(setting.name)}"
        folder, noted = self.place / "runs" / name, self.place / "logs" / f"{name}.seconds"
        if not noted.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            self.begin(setting, name)
            server = self.server(name) if setting.served else None
            began, command = time.monotonic(), self.start(setting, name)
            if command.wait(_LONGEST) != 0:
                raise SystemExit(f"{setting.name} fails though nothing kills it; see {command.log}")
            seconds = time.monotonic() - began
            if server is not None:
                server.driver.kill()
            if orphans := command.orphans():
                raise SystemExit(f"{setting.name} leaves processes though nothing kills it: {orphans}")
            noted.write_text(str(seconds))
        return folder, float(noted.read_text())

    def trial(self, setting: Setting, number: int) -> dict[str, Any]:
        """Kill one run several times, and return its row."""
        whole, seconds = self.whole(setting)
        name = f"{_plain(setting.name)}-{number:03d}"
        folder, log = self.place / "runs" / name, self.place / "logs" / f"{name}.txt"
        for each in (folder, temporary_of(self.place, name), self.place / "caches" / name):
            shutil.rmtree(each, ignore_errors=True)
        log.unlink(missing_ok=True)
        self.begin(setting, name)
        one, began = _Killed(self, setting, name, seconds), time.monotonic()
        problems = one.to_the_end()
        killed = Counter(each["role"] for each in one.kills)
        apart = None
        if not problems:
            problems, apart = differences(setting, whole, folder, killed)
        row = {
            "setting": setting.name,
            "trial": number,
            "kills": one.kills,
            "commands": one.commands,
            "problems": problems,
            "policies_apart": apart,
            "temporary": sorted({_kind(each.name) for each in (temporary_of(self.place, name)).iterdir()}),
            "seconds": round(time.monotonic() - began, 1),
        }
        if not problems:
            for each in (folder, temporary_of(self.place, name), self.place / "caches" / name):
                shutil.rmtree(each, ignore_errors=True)
        return row

    def endpoint(self, number: int) -> dict[str, Any]:
        """Kill a recording endpoint several times, and return its row."""
        name, draw = f"serve-{number:03d}", Random(f"serve {number}")
        record = self.place / "runs" / name
        shutil.rmtree(record, ignore_errors=True)
        began = time.monotonic()
        start = partial(self.server, name, "--record", str(record))
        row = kill_endpoint.trial(start, self.url(name), record, draw, kills=5)
        if not row["problems"]:
            shutil.rmtree(record)
        seconds = round(time.monotonic() - began, 1)
        return {"setting": kill_endpoint.NAME, "trial": number, **row, "seconds": seconds}


class _Killed:
    """One run that is killed and restarted."""

    def __init__(self, trials: Trials, setting: Setting, name: str, seconds: float) -> None:
        self._trials, self._setting, self._name = trials, setting, name
        self._draw = Random(name)
        self._seconds, self._run = seconds, trials.place / "runs" / name
        whole, _ = trials.whole(setting)
        self._stages = {name: note["seconds"] for name, note in _stages(whole).items()}
        self.kills: list[dict[str, Any]] = []
        self.commands = 0
        self._server = trials.server(name) if setting.served else None

    def to_the_end(self) -> list[str]:
        """Kill and restart the command until it succeeds. Return the errors."""
        try:
            return self._to_the_end()
        finally:
            if self._server is not None:
                self._server.driver.kill()

    def _to_the_end(self) -> list[str]:
        while True:
            self.commands += 1
            command = self._trials.start(self._setting, self._name)
            began, before = time.monotonic(), len(self.kills)
            code = self._killed(command, began)
            if code is None:
                return [f"hangs: {command.driver.pid}"]
            if orphans := command.orphans():
                _end(orphans)
                return [f"processes are left: {orphans}"]
            if code == 0:
                return []
            if len(self.kills) == before:
                return [f"ended with {code} though nothing was killed: {_last(command.log)}"]
            if self.kills[-1]["role"] != "driver":
                self.kills[-1]["ended_with"] = code
                if code not in _ENDS.get(self.kills[-1]["role"], {2}):
                    return [
                        f"ended with {code} after {self.kills[-1]['role']} was killed: {_last(command.log)}"
                    ]

    def _killed(self, command: Command, began: float) -> int | None:
        """Kill some processes of a command. Return its exit code, or None if it hangs."""
        while len(self.kills) < self._setting.kills:
            code = command.wait(self._moment(command))
            if code is not None:
                return code
            roles = roles_of(command.driver)
            if self._server is not None:
                roles["engine behind an API"] = [self._server.driver]
            role = self._role(roles)
            if role is None:
                continue
            victim = self._draw.choice(roles[role])
            with suppress(psutil.NoSuchProcess):
                stage = self._stage(command.driver)
                victim.send_signal(signal.SIGKILL)
                self.kills.append({"role": role, "stage": stage, "after": round(time.monotonic() - began, 2)})
                if self._server is not None and victim == self._server.driver:
                    self._server = self._trials.server(self._name)
        return command.wait(_LONGEST)

    def _role(self, roles: Collection[str]) -> str | None:
        """Choose the role to kill at random; None if no process has a wanted role."""
        if wanted := self._trials.roles:
            there = sorted(set(roles) & set(wanted))
            return self._draw.choice(there) if there else None
        others = sorted(set(roles) - {"driver"})
        return "driver" if not others or self._draw.random() < _DRIVER else self._draw.choice(others)

    def _moment(self, command: Command) -> float:
        """Wait for the stage of the next kill, if the command has stages. Return the seconds until the kill.

        Some kills are at a random time of the command. The others are in one of the next stages, with longer stages
        chosen more often.
        """
        if not self._setting.named or self._draw.random() < _ANY_TIME:
            return self._draw.uniform(0, self._seconds * 1.5 / self._setting.kills)
        done = {name for name, note in _stages(self._run).items() if note["done"]}
        waiting = [name for name in self._stages if name not in done]
        if not waiting:
            return self._draw.uniform(0, 2)
        weights = [max(0.5, self._stages[each]) for each in waiting]
        chosen = min(self._draw.choices(waiting, weights, k=2), key=waiting.index)
        until = time.monotonic() + _LONGEST
        while command.wait(0.02) is None and time.monotonic() < until:
            if self._stage(command.driver) == chosen or _stages(self._run).get(chosen, {}).get("done"):
                break
        return self._draw.uniform(0, self._stages[chosen])

    def _stage(self, driver: psutil.Process) -> str:
        """Return the name of the running stage."""
        if not self._setting.named:
            return self._setting.words[0]
        found = noted(self._run)
        if found.get("pid") == driver.pid:
            return "between stages" if found.get("ended") else str(found["stage"])
        return "opening"


def _stages(run: Path) -> dict[str, Any]:
    """Return the stages that a run has begun, with their notes."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((run / "manifest.json").read_text())["stages"]
        return found
    return {}


def noted(run: Path) -> dict[str, Any]:
    """Return the progress that the running stage has written."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((run / "progress.json").read_text())
        return found
    return {}


def _end(orphans: list[int]) -> None:
    """Kill processes that a run has left."""
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _last(log: Path) -> str:
    """Return the last lines of a log."""
    return " / ".join(log.read_text(errors="replace").splitlines()[-6:])[-600:]


def _plain(name: str) -> str:
    """Return a name that is valid for a folder."""
    return "".join(each if each.isalnum() else "-" for each in name)


def _kind(name: str) -> str:
    """Return the name of a temporary file without its random part."""
    return name.partition("_")[0].partition("-")[0]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of kills by setting and role, and of trials that ended correctly."""
    lines = ["| setting | trials | kills | by role | as without kills |", "|---|---|---|---|---|"]
    total: Counter[str] = Counter()
    for setting in NAMES:
        own = [row for row in rows if row["setting"] == setting]
        if not own:
            continue
        roles = Counter(each["role"] for row in own for each in row["kills"])
        total += roles
        said = ", ".join(f"{role} {count}" for role, count in roles.most_common())
        well = sum(not row["problems"] for row in own)
        lines.append(f"| {setting} | {len(own)} | {roles.total()} | {said} | {well} of {len(own)} |")
    said = ", ".join(f"{role} {count}" for role, count in total.most_common())
    well = sum(not row["problems"] for row in rows)
    return "\n".join([*lines, f"| all | {len(rows)} | {total.total()} | {said} | {well} of {len(rows)} |"])


def main() -> None:
    """Run trials until there are enough kills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", type=Path, default=Path("kills"), help="folder to work in")
    parser.add_argument("--kills", type=int, default=200, help="kills in total")
    parser.add_argument("--out", type=Path, required=True, help="rows, of which there may be some")
    parser.add_argument("--settings", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first trial, from which it is drawn"
    )
    parser.add_argument("--roles", nargs="+", default=[], choices=ROLES, help="kill these alone")
    parser.add_argument("--table", action="store_true", help="print the table of the rows, and kill nothing")
    options = parser.parse_args()
    rows = (
        [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    )
    if options.table:
        print(table(rows))
        return
    trials = Trials(options.place.resolve(), options.roles)
    while sum(len(row["kills"]) for row in rows) < options.kills:
        done = Counter(dict.fromkeys(NAMES, options.first))
        done.update(row["setting"] for row in rows)
        name = min(options.settings, key=lambda each: done[each])
        endpoint = name == kill_endpoint.NAME
        row = trials.endpoint(done[name]) if endpoint else trials.trial(SETTINGS[name], done[name])
        rows.append(row)
        with options.out.open("a") as lines:
            print(json.dumps(row), file=lines)
        print(json.dumps(row), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
