r"""Compare a whole online iteration (rollouts, credit, a step) in Perturn and in TRL's GRPOTrainer.

    python benchmarks/iteration.py runs/iteration            one policy, three iterations of each side in turn

The environment is a class for TRL's `environment_factory`: a house of six rooms with a tool call in each. The policy is
first trained on one episode, so that it plays nearly the same episode on both sides. The turns and tokens of the
episodes are printed for each side. Each side runs in its own process, and plays 8 samples of a task with transformers
on the CPU. Iterations alternate, and the first of each side is a warm-up. TRL runs at its defaults, except for the
length of an episode, the decoding, and float32. Perturn saves the policy and reloads it in the engine, as the loop
does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import trl
from datasets import Dataset
from training_models import make_model, threads
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from worker import Worker

from perturn import TurnConfig, TurnTrainer
from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.credit import CREDITS
from perturn.engines.local.engine import LocalEngine
from perturn.envs.trl_factory import TrlFactory
from perturn.episodes.episode import Job, episode
from perturn.episodes.play_many import play
from perturn.episodes.replay import play_script
from perturn.episodes.tool_calls import ToolAction, ToolCall, write_text
from perturn.types import Action, EpisodeProtocol, Sampling, WeightedTrajectory

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

WAYS = ["north", "east", "east", "south", "west", "north"]
SAMPLES, TEMPERATURE = 8, 0.2
PROTOCOL = EpisodeProtocol("house", "tools", max_turns=len(WAYS) + 2)
ROW = {"prompt": [{"role": "user", "content": "Walk through the house to the garden. "}]}


class House:
    """Six rooms; each says which door is open."""

    def reset(self, **row: object) -> str:
        """Stand at the entrance."""
        self.passed = 0
        return self._room()

    def walk(self, way: str) -> str:
        """Walk through a door.

        Args:
            way: north, east, south or west.
        """
        if self.passed < len(WAYS) and way == WAYS[self.passed]:
            self.passed += 1
            return self._room()
        return "That door is closed."

    def get_reward(self) -> float:
        """Share of the rooms that are behind."""
        return self.passed / len(WAYS)

    def _room(self) -> str:
        if self.passed == len(WAYS):
            return "You are in the garden."
        return (
            f"This is room {self.passed} of the house. There are a table, two chairs and a shelf with old books in it, "
            f"and light falls through a small window. A door leads {WAYS[self.passed]}; all other doors are closed."
        )


def world(folder: Path) -> TrlFactory:
    """Return the environment as Perturn plays it."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    return TrlFactory(f"{__file__}:House", {"train": str(rows)})


def make_tokenizer() -> Any:
    """Return SmolLM2's tokenizer, with a chat template that renders tool calls."""
    tokenizer = load_tokenizer("smollm2-135m")
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    return tokenizer


def common(**others: Any) -> dict[str, Any]:
    """Return the settings of every trainer, with further settings."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        **others,
    }


def teach(folder: Path, size: str) -> None:
    """Train a policy to play one episode."""
    env, tokenizer = world(folder), make_tokenizer()
    said = [ToolAction("", (ToolCall("walk", {"way": way}),)) for way in WAYS] + [ToolAction("I am there.")]
    steps = episode(env, Job(env.tasks("train")[0], 0), protocol=PROTOCOL)
    shown = play_script(steps, [Action(write_text(each)) for each in said], OSError("more"))
    args = TurnConfig(**common(loss={"name": "sft"}, max_steps=150, learning_rate=2e-3))
    model = make_model(size, len(tokenizer))
    trainer = TurnTrainer(model, args=args, train_dataset=[shown], processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)  # standard output is for the results
    trainer.train()
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    trainer.save_model(str(folder / "policy"))
    print(f"taught, loss {trainer.state.log_history[-2]['loss']:.4f}", file=sys.stderr)


def ours(folder: Path) -> None:
    """Run an iteration for each request: play, compute credit, train, and reload the policy in the engine."""
    tokenizer, env = make_tokenizer(), world(folder)
    renderer, credit = Renderer(tokenizer), CREDITS["grpo"]()
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(folder / "policy"), renderer)
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=60)
    jobs = [Job(env.tasks("train")[0], sample, sample) for sample in range(SAMPLES)]
    for _ in sys.stdin:
        start = time.perf_counter()
        played = list(play(jobs, engine, lambda: world(folder), protocol=PROTOCOL, sampling=sampling))
        rolled = time.perf_counter()
        rows = [
            WeightedTrajectory(one, tuple(weight.tolist()))
            for one, weight in zip(played, credit(played), strict=True)
        ]
        args = TurnConfig(
            **common(
                loss={"name": "ppo-clip"},
                max_steps=1,
                per_device_train_batch_size=SAMPLES,
                learning_rate=1e-9,
            )
        )
        trainer = TurnTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        trained = time.perf_counter()
        trainer.save_model(str(folder / "next"))
        engine.update_weights(folder / "next", "next")
        for job in jobs:
            engine.forget(job.conversation)
        answer(
            seconds=time.perf_counter() - start,
            rollouts=rolled - start,
            training=trained - rolled,
            tokens=sum(len(turn.action.token_ids or ()) for one in played for turn in one.turns) / SAMPLES,
            reward=sum(one.total_reward for one in played) / SAMPLES,
        )


class Clock(TrainerCallback):
    """Callback that waits for a request before each iteration."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._wait()

    def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, Any], **____: Any) -> None:
        if "grad_norm" in logs:
            seconds, step = time.perf_counter() - self.start, float(logs["step_time"])
            tokens, reward = float(logs["completions/mean_length"]), float(logs["reward"])
            answer(seconds=seconds, rollouts=None, training=None, tokens=tokens, reward=reward, step=step)
            self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        self.start = time.perf_counter()


def theirs(folder: Path, iterations: int) -> None:
    """Run GRPOTrainer, whose step plays, computes advantages and trains."""
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "policy"),
        args=trl.GRPOConfig(
            **common(
                max_steps=iterations,
                logging_steps=1,
                num_generations=SAMPLES,
                max_completion_length=800,
                temperature=TEMPERATURE,
                learning_rate=1e-9,
            )
        ),
        train_dataset=Dataset.from_list([ROW] * iterations),
        processing_class=make_tokenizer(),
        environment_factory=House,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    trainer.train()


def answer(**found: float | None) -> None:
    """Print one line for the process that asked. Libraries print elsewhere."""
    print(json.dumps(found), file=sys.__stdout__, flush=True)


def main() -> None:
    """Parse the options, measure, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where the policy is, or is made")
    parser.add_argument("--size", default="5M")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        settings = json.loads(options.worker)
        folder, sys.stdout = Path(settings["folder"]), sys.stderr
        ours(folder) if settings["side"] == "perturn" else theirs(folder, settings["iterations"])
        return
    folder = options.folder or parser.error("name a folder for the policy.")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "policy").exists():
        teach(folder, options.size)
    told = {"folder": str(folder), "iterations": options.iterations + 1}
    with (
        Worker(__file__, told | {"side": "trl"}) as peer,
        Worker(__file__, told | {"side": "perturn"}) as mine,
    ):
        asked = [(peer.ask("go"), mine.ask("go")) for _ in range(options.iterations + 1)][1:]
    ratio = median(one["seconds"] / other["seconds"] for one, other in asked)
    print(
        json.dumps(
            {"ratio": round(ratio, 2), "threads": threads(), "trl": asked[-1][0], "ours": asked[-1][1]}
        )
    )


if __name__ == "__main__":
    main()
