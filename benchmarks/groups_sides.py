"""Run the trainers that are compared on groups of episodes. Each runs its own `train`, one step on request."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from datasets import Dataset
from training_data import Episode
from training_models import make_model
from training_sides import achieved_flops, make_tokenizer, matmul_ceiling
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from worker import held, peak

from perturn import TurnConfig, TurnTrainer
from perturn.losses import LOSSES
from perturn.policy.credit_weights import weigh_all
from perturn.policy.examples import Example
from perturn.policy.logprobs import action_logprobs, pack_by_pack
from perturn.policy.packing import Examples
from perturn.types import Action, Task, Trajectory, Turn, WeightedTrajectory

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

TRL_BATCH = 8
"""Default number of episodes in a pass of TRL's."""


def settings(dtype: str, device: str, steps: int) -> dict[str, Any]:
    """Return the settings of both trainers. The learning rate is so low that weights do not change between steps."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "learning_rate": 1e-12,
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": dtype == "bfloat16",
        "use_cpu": device == "cpu",
        "report_to": [],
        "disable_tqdm": True,
    }


class Clock(TrainerCallback):
    """Callback that waits for a request before each step, and answers with the figures of the step."""

    def __init__(self, device: str) -> None:
        self._device, before = device, held() if device == "cpu" else 0
        self.others: dict[str, Callable[[], Any]] = {"peak": lambda: peak(device) - before}
        self._start = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._wait()

    def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, Any], **____: Any) -> None:
        if "grad_norm" in logs:
            seconds = self._now() - self._start
            self._answer({"seconds": seconds, "loss": float(logs["loss"]), "norm": float(logs["grad_norm"])})
            self._wait()

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _answer(self, found: Any) -> None:
        print(json.dumps(found), file=sys.__stdout__, flush=True)

    def _wait(self) -> None:
        for line in sys.stdin:
            if line.strip() == "step":
                self._start = self._now()
                return
            self._answer(self.others[line.strip()]())
        raise SystemExit


def advantages(episodes: list[Episode], samples: int) -> Iterator[float]:
    """Yield advantages as GRPOTrainer computes them by default, so that both losses are equal."""
    for first in range(0, len(episodes), samples):
        rewards = [each.reward for each in episodes[first : first + samples]]
        yield from ((reward - mean(rewards)) / (stdev(rewards) + 1e-4) for reward in rewards)


def perturn(
    size: str,
    vocab: int,
    common: dict[str, Any],
    steps: list[list[Episode]],
    samples: int,
    ours: dict[str, Any],
) -> TurnTrainer:
    """Return a TurnTrainer, with its own policy's log-probabilities in place of the engine's."""
    turn = Turn(({"role": "user", "content": "a"},), Action("b", (5, 1), (-1.0, -1.0)))
    row = WeightedTrajectory(Trajectory(Task("a"), (turn,)), (1.0,))
    trainer = TurnTrainer(
        make_model(size, vocab),
        args=TurnConfig(
            loss={"name": "ppo-clip"},
            per_device_train_batch_size=len(steps[0]),
            train_sampling_strategy="sequential",
            **common,
            **ours,
        ),
        train_dataset=[row],
        processing_class=make_tokenizer(),
    )
    episodes = [episode for step in steps for episode in step]
    with torch.no_grad(), trainer._autocast():
        encoded = [each.encoded for each in episodes]
        sampled = pack_by_pack(action_logprobs, trainer.model, encoded, trainer.args.token_budget)
    rows = [
        Example(each.encoded, behavior=(behavior,), weight=(torch.full((each.encoded.turns,), weight),))
        for each, behavior, weight in zip(episodes, sampled, advantages(episodes, samples), strict=True)
    ]
    trainer.train_dataset = Examples(weigh_all(rows, LOSSES["ppo-clip"](), trainer.credit))
    return trainer


def trl(
    size: str, vocab: int, common: dict[str, Any], steps: list[list[Episode]], samples: int
) -> GRPOTrainer:
    """Return a GRPOTrainer at its defaults, with a `rollout_func` that returns the episodes."""
    left = iter(steps)

    def rollout(prompts: list[str], _: Any) -> dict[str, list[Any]]:
        episodes = next(left)
        assert len(prompts) == len(episodes)
        sampled = [list(each.encoded.ids[each.prompt :]) for each in episodes]
        return {
            "prompt_ids": [list(each.encoded.ids[: each.prompt]) for each in episodes],
            "completion_ids": sampled,
            "logprobs": [[0.0] * len(ids) for ids in sampled],  # only read with vLLM
            "env_mask": [[int(turn >= 0) for turn in each.encoded.turn[each.prompt :]] for each in episodes],
            "earned": [each.reward for each in episodes],
        }

    def reward(earned: list[float], **_: Any) -> list[float]:
        return earned

    args = GRPOConfig(
        num_generations=samples, gradient_accumulation_steps=max(1, len(steps[0]) // TRL_BATCH), **common
    )
    rows = Dataset.from_list([{"prompt": "a"}] * (len(steps[0]) // samples * len(steps)))
    return GRPOTrainer(
        make_model(size, vocab),
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        processing_class=make_tokenizer(),
        rollout_func=rollout,
    )


def work(case: dict[str, Any], side: str, steps: list[list[Episode]]) -> None:
    """Train in this process, one step for each request."""
    size, vocab, samples = case["size"], case["vocab"], case["samples"]
    common = settings(case["dtype"], case["device"], len(steps))
    clock = Clock(case["device"])
    sys.stdout = sys.stderr  # standard output is for answers
    if side == "trl":
        trainer: Any = trl(size, vocab, common, steps, samples)
    else:
        trainer = perturn(size, vocab, common, steps, samples, case["ours"])
        packs = trainer.data_collator(trainer.train_dataset.rows[-len(steps[0]) :])
        clock.others["flops"] = lambda: achieved_flops(size, vocab, packs)
        clock.others["tokens"] = lambda: sum(len(pack["ids"]) for pack in packs["packs"])
        clock.others["ceiling"] = lambda: matmul_ceiling(size, case["dtype"], 4096)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    Path(common["output_dir"]).mkdir(exist_ok=True)
    trainer.train()
