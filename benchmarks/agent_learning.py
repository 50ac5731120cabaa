"""Compare online learning through the endpoint with the same learning in the built-in environment.

    ALFWORLD_DATA=... python benchmarks/agent_learning.py FOLDER             three seeds
    ALFWORLD_DATA=... python benchmarks/agent_learning.py FOLDER --seeds 0   one seed

All runs start from one policy: the base model of `recipes/alfworld_lab.yaml` after SFT. For each seed, two runs train
with RLOO and `ppo-clip`, on the same games and with the same settings. One run plays in the built-in environment
`alfworld`. In the other run, an agent (`rollout` below) plays the same games with OpenAI's client through the endpoint.
The evaluation samples actions too. The last table compares the gains on the games of `valid_seen`, paired by seed and
game. The same command resumes an interrupted benchmark.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from perturn.data.store import read_trajectories
from perturn.envs.alfworld.environment import ALFWorld
from perturn.episodes.formats import FORMATS
from perturn.stats.seeds_and_tasks import crossed_comparison
from perturn.types import Task

ROOT = Path(__file__).resolve().parents[1]
TURNS, TOKENS, ITERATIONS = 30, 16, 15
SAMPLING = {"temperature": 1.0, "max_new_tokens": TOKENS}
FORMAT = FORMATS["action"]


def tasks(split):
    """List the games of a split, as rows in the order of the built-in environment."""
    return [{"id": one.id, "kind": one.kind, "split": split} for one in ALFWorld().tasks(split)]


# Each episode is played in a fork of the process that imports this file, so that the list of games is read once.
ALFWorld().tasks("train")


async def rollout(task, client):
    """Play a game through the endpoint. Return the reward, and whether the game was solved."""
    world = ALFWorld()
    seen = world.reset(Task(task["id"], task["kind"], task["split"]))
    messages = [{"role": "system", "content": FORMAT.instruction}, {"role": "user", "content": seen.text}]
    reward = 0.0
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        action = re.fullmatch(r"Action:\s*([^\n]*\S)", said.strip())
        if action is None:
            messages.append({"role": "user", "content": FORMAT.reminder})
            continue
        seen = world.step(action[1].strip())
        reward += seen.reward
        if seen.terminated:
            break
        messages.append({"role": "user", "content": seen.text})
    return {"reward": reward, "success": seen.success}


def main() -> None:
    """Run the missing runs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words = parser.parse_args()
    words.folder.mkdir(parents=True, exist_ok=True)
    run(words.folder, "start", start())
    model = str((words.folder / "start" / "checkpoints" / "sft").resolve())
    for seed in words.seeds:
        run(words.folder, f"built-in-{seed}", online(seed, model, {"name": "alfworld"}, "alfworld-lab"))
        agent = {
            "name": "agent",
            "function": f"{__file__}:rollout",
            "tasks": f"{__file__}:tasks",
            "seconds": 120,
        }
        run(words.folder, f"agent-{seed}", online(seed, model, agent, "agent"))
    print(json.dumps(found(words.folder, words.seeds), indent=1))


def start():
    """Return the laboratory's recipe up to SFT."""
    recipe = yaml.safe_load((ROOT / "recipes" / "alfworld_lab.yaml").read_text())
    recipe = {key: recipe[key] for key in ("model", "environment", "protocol", "base", "sft", "evaluate")}
    recipe["base"]["seed"] = 0
    recipe["evaluate"] |= {"sampling": SAMPLING}
    return recipe | {"seed": 0}


def online(seed, model, environment, protocol):
    """Return a recipe of fifteen iterations of RLOO from a policy."""
    return {
        "seed": seed,
        "model": {"name": model},
        "environment": environment,
        "protocol": {"name": protocol, "max_turns": TURNS},
        "iterations": ITERATIONS,
        "explore": {
            "tasks": {"split": "train", "n": 600, "skip": 1000},
            "per_iteration": 16,
            "samples": 8,
            "sampling": SAMPLING,
            "concurrency": 64,
        },
        "rows": {"name": "groups"},
        "credit": {"name": "rloo"},
        "align": {
            "loss": {"name": "ppo-clip", "kl": 0.02, "kl_estimator": "k3"},
            "reference": "start",
            "minibatches": 4,
            "token_budget": 16384,
            "learning_rate": 1.5e-4,
            "scheduler": "constant",
            "warmup_ratio": 0,
            "adam_beta2": 0.95,
        },
        "evaluate": {
            "tasks": {"split": "valid_seen"},
            "sampling": SAMPLING,
            "concurrency": 64,
            "every": ITERATIONS,
        },
    }


def run(folder, name, recipe):
    """Run or resume a recipe."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"name": name, **recipe}))
    subprocess.run([sys.executable, "-m", "perturn", "run", str(file), f"output={folder}"], check=True)


def found(folder, seeds):
    """Return the success of each policy by seed, and their differences.

    The starting policy is scored again with each seed, so that its score does not depend on a single sampling.
    """
    table = {name: [solved(folder, name, seed) for seed in seeds] for name in ("start", "built-in", "agent")}
    games = sorted(set.intersection(*(set(one) for rows in table.values() for one in rows)))
    scores = {name: [[one[game] for game in games] for one in rows] for name, rows in table.items()}
    compared = {"agent over start": ("agent", "start"), "built-in over start": ("built-in", "start")}
    compared["agent over built-in"] = ("agent", "built-in")
    rows = {name: crossed_comparison(scores[a], scores[b]) for name, (a, b) in compared.items()}
    return {
        "games": len(games),
        "seeds": seeds,
        "success": {name: [round(sum(one) / len(one), 4) for one in rows] for name, rows in scores.items()},
        "difference": {
            name: {"mean": one.mean_difference, "interval": [one.low, one.high], "p": one.p_value}
            for name, one in rows.items()
        },
    }


def solved(folder, name, seed):
    """Return whether each game was solved, by the starting policy (`start`) or by the last policy of a run."""
    run, policy = ("built-in", "base") if name == "start" else (name, f"ppo-clip-{ITERATIONS:03d}")
    file = folder / f"{run}-{seed}" / "evaluation" / f"{policy}.jsonl"
    return {one.task.id: float(bool(one.success)) for one in read_trajectories(file)}


if __name__ == "__main__":
    main()
