"""Define what `benchmarks/kills.py` kills: an environment, short recipes, roles of processes, and expected results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from perturn.data.group_account import BINS
from perturn.run.verify_run import verify

TALK = '''
import os
import time

from perturn.types import Observation, Task

WORDS = ["door 1", "door 2", "door 3", "door 4"]


class Talk:
    """Two turns; each is rewarded whose text has an even number of letters. A step takes TALK_PAUSE seconds."""

    name = "talk-1.0"

    def tasks(self, split):
        return [Task(f"{split}-{n}", WORDS[n % 4], split) for n in range(12)]

    def reset(self, task, seed):
        self.task, self.turns = task, 0
        return Observation(f"Task {task.id} : say {task.kind}", state_key="begun")

    def step(self, action):
        time.sleep(float(os.environ.get("TALK_PAUSE", "0")))
        self.turns += 1
        good, last = len(action) % 2 == 0, self.turns == 2
        key = f"said {good}"
        return Observation("Go on", reward=0.5 * good, terminated=last, success=last and good, state_key=key)

    def expert(self, task):
        return [task.kind, task.kind]

    def close(self):
        pass
'''
AGENT = """
import json
import os
import sys
import time
import urllib.request

TASK = json.load(sys.stdin)
said = [{"role": "user", "content": f"Task {TASK['id']} : say door 1"}]
good = 0
for _ in range(2):
    time.sleep(float(os.environ.get("TALK_PAUSE", "0")))
    body = json.dumps({"model": "policy", "messages": said, "max_tokens": 2}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = json.loads(answer.read())["choices"][0]["message"]["content"] or ""
    good += len(text) % 2 == 0
    said += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on"}]
print(json.dumps({"reward": 0.5 * good}))
"""
COMMON = """
name: one
output: runs
model: {name: tiny, dtype: float32}
environment: {name: "perturn_talk:Talk"}
protocol: {name: talk, format: plain, system: Talk, max_turns: 3}
worlds: {processes: 0, retries: 9}
deterministic: true
"""
OFFLINE = """
sft: {loss: {name: sft}, tasks: {n: 4}, epochs: 2, batch_size: 2, learning_rate: 1.0e-2, save_steps: 1}
explore:
  tasks: {n: 6, skip: 4}
  samples: 2
  sampling: {temperature: 1.0, max_new_tokens: 3}
  concurrency: 4
rows: {name: expert-pairs, threshold: 0.2}
align: {loss: {name: tlm-dre}, epochs: 2, batch_size: 2, learning_rate: 1.0e-3, save_steps: 1}
evaluate: {tasks: {split: test, n: 4}, sampling: {max_new_tokens: 3}, concurrency: 2}
"""
ONLINE = """
iterations: 3
explore: {per_iteration: 3, samples: 4, sampling: {temperature: 1.0, max_new_tokens: 3}, concurrency: 4}
rows: {name: groups}
credit: {name: anchor-rloo}
align:
  loss: {name: ppo-clip, kl: 0.1}
  reference: start
  minibatches: 2
  learning_rate: 1.0e-3
  warmup_ratio: 0
  save_steps: 1
evaluate: {tasks: {split: test, n: 4}, sampling: {max_new_tokens: 3}, every: 2, concurrency: 2}
"""
AGENTS = """
name: one
output: runs
model: {name: tiny, dtype: float32}
environment: {name: agent, tasks: {train: train.jsonl, test: test.jsonl}, command: [python, talk_agent.py]}
deterministic: true
iterations: 2
explore: {samples: 4, sampling: {temperature: 1.0, max_new_tokens: 2}, concurrency: 4}
rows: {name: groups}
credit: {name: rloo}
align: {loss: {name: ppo-clip}, learning_rate: 1.0e-3, warmup_ratio: 0, save_steps: 1}
evaluate: {tasks: {split: test}, sampling: {max_new_tokens: 2}, every: 2}
"""


@dataclass(frozen=True)
class Setting:
    """A command to kill, and the results that must be equal at its end."""

    name: str
    words: tuple[str, ...]
    """Arguments after `perturn`, except the name of the run."""
    equal: str = "bit"
    """Required equality. `bit`: episodes, weights of turns, metrics and policies are equal byte by byte. `close`:
    counts are equal, and policies within 1e-6. `counted`: only counts are equal."""
    kills: int = 5
    """Number of kills in a trial."""
    pause: float = 0.02
    """Duration of a step in the environment, in seconds."""
    before: tuple[str, ...] = ()
    """Arguments of an earlier command that is not killed."""
    named: bool = True
    """Whether the arguments name a recipe, to which the name of the run is added. Otherwise the run folder is added."""
    served: bool = False
    """Whether the engine is a server behind an API, which is also killed and restarted."""
    files: tuple[str, ...] = field(
        default=(
            "trajectories/*.jsonl",
            "evaluation/*.jsonl",
            "pairs*.jsonl",
            "credits/*.jsonl",
            "metrics/*.jsonl",
            "measure/*.json*",
            "checkpoints/*/model.safetensors",
        )
    )
    """Files that are compared byte by byte."""


_WORLDS = "worlds.processes=4"
_TWO = ("launch.processes=2", "align.learning_rate=1.0e-5")
_SHARDED = "launch.sharding=fsdp2"
_STALE = ("deterministic=false", "staleness=1", "credit.name=rloo")
_WINDOW = ("explore.name=window", "explore.turns=1", "credit.name=turn-gae", "evaluate=null")
SETTINGS = {
    each.name: each
    for each in (
        Setting("offline", ("run", "offline.yaml")),
        Setting("offline, environments in processes", ("run", "offline.yaml", _WORLDS)),
        Setting("online", ("run", "online.yaml")),
        Setting("online, environments in processes", ("run", "online.yaml", _WORLDS)),
        Setting("explore.name=window", ("run", "online.yaml", *_WINDOW)),
        Setting("staleness=1", ("run", "online.yaml", *_STALE, _WORLDS), equal="counted"),
        Setting(
            "launch.processes=2, offline",
            ("run", "offline.yaml", "sft=null", _TWO[0]),
            equal="close",
            kills=6,
        ),
        Setting("launch.processes=2, online", ("run", "online.yaml", *_TWO), equal="close", kills=6),
        Setting("launch.processes=2, fsdp2", ("run", "online.yaml", *_TWO, _SHARDED), equal="close", kills=6),
        Setting("agents through the endpoint", ("run", "agents.yaml")),
        Setting(
            "cluster=local",
            ("run", "online.yaml", "iterations=2", "cluster={address: local, wait_seconds: 200}"),
        ),
        Setting("perturn collect", ("collect", "collect.yaml", _WORLDS), pause=0.1),
        Setting(
            "an engine behind an API",
            ("collect", "collect.yaml", "deterministic=false"),
            equal="counted",
            pause=0.1,
            served=True,
        ),
        Setting(
            "perturn measure",
            ("measure", "--credits", "rloo,uniform", "--episodes", "6", "--continuations", "4"),
            before=("run", "online.yaml", "iterations=1", "evaluate=null"),
            named=False,
            pause=0.05,
        ),
    )
}
_ROLES = {
    "environment": lambda words: "perturn.envs.world_child" in words,
    "launcher": lambda words: "torch.distributed.run" in words,
    "trainer rank": lambda words: "perturn.run.launch.training_process" in words,
    "agent program": lambda words: "talk_agent.py" in words,
    "Ray environments": lambda words: words.startswith("ray::WorldServer"),
    "Ray engine": lambda words: words.startswith("ray::EngineServer"),
    "Ray node": lambda words: "/raylet/raylet" in words,
    "Ray head": lambda words: "/gcs_server" in words,
}
"""Roles of the processes that a run has started, each with a test of the command line. The first match counts."""
ROLES = ["driver", "engine behind an API", *_ROLES]
"""Roles that can be killed."""


def roles_of(driver: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run by role: the process of the command and its descendants."""
    found: dict[str, list[psutil.Process]] = {"driver": [driver]}
    with suppress(psutil.NoSuchProcess):  # the process has ended
        for process in driver.children(recursive=True):
            words = ""
            with suppress(psutil.Error):
                words = " ".join(process.cmdline())
            role = next((name for name, fits in _ROLES.items() if fits(words)), None)
            if role is not None:
                found.setdefault(role, []).append(process)
    return found


def prepare(place: Path) -> None:
    """Write the environment, the agent, the recipes, and a random policy."""
    if (place / "tiny" / "tokenizer.json").is_file():
        return
    import torch

    from perturn.chat.word_tokenizer import make_tokenizer
    from perturn.config.sections import Shape
    from perturn.policy.models import new_model

    place.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "perturn_talk.py": TALK,
        "talk_agent.py": AGENT,
        "offline.yaml": COMMON + OFFLINE,
        "collect.yaml": COMMON
        + OFFLINE.replace(f"sft: {OFFLINE.partition('sft: ')[2].partition(chr(10))[0]}", ""),
        "online.yaml": COMMON + ONLINE,
        "agents.yaml": AGENTS,
    }.items():
        (place / name).write_text(text)
    for split, ids in {"train": ["a", "b", "c"], "test": ["d", "e"]}.items():
        (place / f"{split}.jsonl").write_text("".join(json.dumps({"id": each}) + "\n" for each in ids))
    doors = ["door 1", "door 2", "door 3", "door 4"]
    said = [f"Task {name} : say {door}" for name in ("train-1", "test-1", "a") for door in doors]
    tokenizer = make_tokenizer([*said, *doors, "Talk", "Go on"], 512)
    torch.manual_seed(0)
    shape = Shape(hidden=32, layers=2, heads=4, mlp=64, context=512)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    new_model(shape, len(tokenizer), **ends).save_pretrained(place / "tiny")
    tokenizer.save_pretrained(place / "tiny")


def differences(
    setting: Setting, whole: Path, run: Path, killed: Mapping[str, int]
) -> tuple[list[str], float]:
    """Return the differences between a killed run and a run without kills, and the distance of their policies."""
    equal = "counted" if killed.get("agent program") else setting.equal
    found = [f"damaged: {each.file}" for each in verify(run).damaged]
    found += [f"episodes of {name}" for name in _unequal(_episodes(whole), _episodes(run))]
    lost = killed.get("agent program", 0)
    if lost == 0 and setting.equal != "counted":
        found += [f"counts of {name}" for name in _unequal(_counts(whole), _counts(run))]
    found += [f"the bins of {name} do not sum up" for name, row in _counts(run).items() if not _sums_up(row)]
    if equal == "bit":
        found += [f"bytes of {name}" for name in _unequal(_read(setting, whole), _read(setting, run))]
    apart = _apart(whole, run) if equal != "counted" else 0.0
    found += [f"policies differ by {apart:.1e}"] if apart > (0 if equal == "bit" else 1e-6) else []
    left = [each for each in run.rglob("*") if "partial" in each.name or each.name.endswith(".tmp")]
    return found + [f"left behind: {each.relative_to(run)}" for each in left], apart


def _read(setting: Setting, run: Path) -> dict[str, Any]:
    """Return the compared files. In some of them, the order of the lines depends on which episode ends first."""
    files = [file for pattern in setting.files for file in run.glob(pattern)]
    found = {str(file.relative_to(run)): file.read_bytes() for file in files}
    unordered = ("expert", "continuations")
    return {
        name: sorted(data.splitlines()) if any(each in name for each in unordered) else data
        for name, data in found.items()
    }


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _episodes(run: Path) -> dict[str, list[tuple[str, int]]]:
    """Return the episodes of each file, by task and sample."""
    found = {}
    for file in (*run.glob("trajectories/*.jsonl"), *run.glob("evaluation/*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[str(file.relative_to(run))] = sorted((row["task"]["id"], row["sample"]) for row in rows)
    return found


def _counts(run: Path) -> dict[str, Any]:
    """Return the counts of each stage."""
    stages = json.loads((run / "manifest.json").read_text())["stages"]
    return {name: note["counts"] for name, note in stages.items()}


def _sums_up(counts: Mapping[str, Any]) -> bool:
    """Return whether the bins of a credit stage add up to the requested episodes; True for any other stage."""
    return "asked" not in counts or sum(counts.get(name, 0) for name in BINS) == counts["asked"]


def _apart(whole: Path, run: Path) -> float:
    """Return the largest difference between weights of the policies of two runs."""
    from safetensors.torch import load_file

    found = 0.0
    for file in whole.glob("checkpoints/*/model.safetensors"):
        one, other = load_file(file), load_file(run / file.relative_to(whole))
        found = max([found, *(float((one[name] - other[name]).abs().max()) for name in one)])
    return found
