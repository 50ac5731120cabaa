"""Run a part of `benchmarks/gpu.py` in its own process. Each part prints its rows as JSON, one row per line."""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_rows import say, time_online
from rollouts_sides import WORDS, Words
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from training_data import Shape, make_groups, make_pairs
from training_models import make_model
from training_sides import ROWS, make_tokenizer, settings

from perturn import TurnConfig, TurnTrainer
from perturn.engines.local.engine import LocalEngine
from perturn.estimate.memory import model_shape, training_memory
from perturn.policy.attention import _sees, block_mask, forest_attention
from perturn.policy.examples import Example
from perturn.policy.logprobs import action_logprobs, pack_by_pack
from perturn.policy.packing import Collator, lay_out
from perturn.training.sharding import fsdp2, whole_weights
from perturn.types import Action, Prompt, Sampling

HEADS, KEY_HEADS, FEATURES = 9, 3, 64
"""Attention heads, key heads and head size of SmolLM2-135M."""


def attention(quick: bool) -> None:
    """Time one layer, forward and backward, over packed groups of episodes.

    The peers compute the same attention. One is torch's scaled dot-product attention with a dense mask. The other is
    torch's causal flash attention on each whole sequence, without sharing.
    """
    for tasks, worked in ((1, 100),) if quick else ((1, 100), (1, 600), (4, 600)):
        step = make_groups(Shape(), 49_152, worked, tasks, 8, 1)[0]
        batch = lay_out([episode.encoded for episode in step])
        segments, tokens = batch["segments"].cuda(), len(batch["ids"])
        lengths = [len(episode.encoded.ids) for episode in step]
        case = f"{8 * tasks} episodes, worked example of {worked}: {sum(lengths)} tokens, {tokens} packed"
        layer = torch.nn.Module()
        layer.num_key_value_groups = HEADS // KEY_HEADS
        layer.train()

        blocks = block_mask(segments)

        def forest(blocks: Any = blocks, tokens: int = tokens, layer: Any = layer) -> None:
            _backward(lambda q, k, v: forest_attention(layer, q, k, v, blocks)[0], [tokens])

        places = torch.arange(tokens, device="cuda")
        dense = _sees(segments)(places, places, places[:, None], places)

        def masked(dense: Any = dense, tokens: int = tokens) -> None:
            _backward(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True), [tokens]
            )

        def unshared(lengths: list[int] = lengths) -> None:
            _backward(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                lengths,
            )

        began = time.perf_counter()
        forest()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        ours, *others = (_milliseconds(each) for each in (forest, masked, unshared))
        names = ("under a dense mask", "causal, nothing shared")
        for name, theirs in zip(names, others, strict=True):
            say("attention, ms a layer", f"{case}; {name}", ours, theirs, theirs / ours, first_seconds=first)
        torchs = _milliseconds(
            lambda s=segments, n=tokens: create_block_mask(_sees(s), None, None, n, n, device="cuda")
        )
        ours = _milliseconds(lambda s=segments: block_mask(s))
        say("block mask, ms a batch", f"{case}; create_block_mask", ours, torchs, torchs / ours)


def _backward(attend: Callable[..., Any], lengths: list[int]) -> None:
    for length in lengths:
        query, key, value = (
            torch.randn(1, heads, length, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        attend(query, key, value).sum().backward()


def _milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(median(times), 3)


def precision(quick: bool) -> None:
    """Compare log-probabilities between GPU and CPU in training, and between the engine and training."""
    model = make_model("135M", WORDS)
    step = make_groups(Shape(turns=(3, 6)), WORDS, 100, 1, 4, 1)[0]
    encoded = [episode.encoded for episode in step]
    with torch.no_grad():
        cpu = torch.cat(pack_by_pack(action_logprobs, model, encoded, 8_192))
        model = model.cuda()
        for name in ("float32", "bfloat16"):
            model = model.to(getattr(torch, name))
            found = torch.cat(pack_by_pack(action_logprobs, model, encoded, 8_192))
            _differences(f"packed on GPU in {name} against CPU in float32", found - cpu)
    for name in ("float32", "bfloat16"):
        model = make_model("135M", WORDS).to(getattr(torch, name)).cuda().eval()
        _differences(f"engine against training, both in {name}", _sampled(model, 8 if quick else 64))


def _differences(case: str, found: torch.Tensor) -> None:
    found = found.abs().double()
    say(
        "log-probabilities, nats apart",
        case,
        {"mean": f"{found.mean():.1e}", "largest": f"{found.max():.1e}"},
        tokens=len(found),
    )


def _sampled(model: Any, conversations: int) -> torch.Tensor:
    """Return log-probabilities of a forward pass minus the log-probabilities at sampling, in nats [tokens]."""
    draw = random.Random(0)
    engine = LocalEngine(model, Words())
    words = Words()
    heard = [" ".join(str(draw.randrange(WORDS)) for _ in range(200)) for _ in range(conversations)]
    prompts = [
        Prompt((), (), ({"role": "user", "content": text},), number, str(number))
        for number, text in enumerate(heard)
    ]
    answers = engine.generate(prompts, Sampling(temperature=1.0, max_new_tokens=30))
    engine.close()
    found = []
    with torch.no_grad():
        for text, answer in zip(heard, answers, strict=True):
            assert isinstance(answer, Action)
            ids = [*words.ids(text), *(answer.token_ids or ())]
            new = len(answer.token_ids or ())
            logits = model(torch.tensor([ids], device="cuda")).logits[0, -new - 1 : -1].float()
            own = logits.log_softmax(-1).gather(1, torch.tensor([ids[-new:]], device="cuda").T)[:, 0]
            found.append(own.cpu() - torch.tensor(answer.logprobs))
    return torch.cat(found)


def memory(quick: bool) -> None:
    """Measure the peak memory of tensors in training, and report the estimate of the dry run's formula."""
    cases = [("135M", False, False), ("135M", True, False)]
    if not quick:
        cases += [("135M", False, True), ("1B", False, False), ("1B", False, True), ("1B", True, True)]
    for size, lora, checkpointing in cases:
        for budget in (16_384,) if quick else (4_096, 16_384):
            gigabytes, formula, about = _training_gigabytes(size, lora, checkpointing, budget)
            words = f"{size}, {'LoRA' if lora else 'full'}, {'checkpointed, ' if checkpointing else ''}"
            say("memory of training, GB", f"{words}{budget} tokens a pass", gigabytes, formula, **about)
            gc.collect()
            torch.cuda.empty_cache()


def _training_gigabytes(
    size: str, lora: bool, checkpointing: bool, budget: int
) -> tuple[float, float, dict[str, int]]:
    """Return the peak gigabytes of tensors over two steps, the gigabytes by formula, and the largest pass."""
    before = torch.cuda.memory_allocated()  # of an earlier case
    torch.cuda.reset_peak_memory_stats()
    adapters = None
    if lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    args = TurnConfig(
        loss={"name": "dpo"},
        token_budget=budget,
        gradient_checkpointing=checkpointing,
        reference_cache=tempfile.mkdtemp(),
        **settings("bfloat16", "cuda"),
    )
    made = make_model(size, 49_152)
    shape = model_shape(made)
    trainer = TurnTrainer(
        made,
        args=args,
        train_dataset=ROWS,
        processing_class=make_tokenizer(),
        peft_config=adapters,
    )
    if checkpointing:  # as `train` does
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.create_optimizer()
    model = trainer.accelerator.prepare(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    for batch in make_pairs(Shape(), 49_152, 24, 2, "assistant"):
        examples = [_example(pair.example) for pair in batch]
        inputs = Collator(budget)(examples)
        items = trainer._get_num_items_in_batch([inputs], torch.device("cpu"))
        trainer.training_step(model, inputs, items)
        trainer.optimizer.step()
        model.zero_grad()
    largest = max(inputs["packs"], key=lambda pack: len(pack["ids"]))
    sizes = {
        "tokens": len(largest["ids"]),
        "loss_tokens": len(largest["predictor"]),
        "passes": len(inputs["packs"]),
    }
    formula = training_memory(
        shape, adapters=shape.adapters(16) if lora else 0, checkpointing=checkpointing, **sizes
    )
    measured = torch.cuda.max_memory_allocated() - before
    return round(measured / 1e9, 2), round(formula.peak / 1e9, 2), sizes


def _example(example: Example) -> Example:
    """Add the numbers that a loss reads. Their values do not affect the memory."""
    sides = example.sides
    return Example(
        *sides,
        tuple(torch.zeros(sum(turn >= 0 for turn in side.turn)) for side in sides),
        weight=tuple(torch.ones(side.turns) for side in sides),
    )


def online(quick: bool) -> None:
    """Run two online iterations of a policy of 135M parameters on one GPU, with full weights and with LoRA."""
    variants = {"full": (), "LoRA": ("align.lora={rank: 16, alpha: 32}", "align.learning_rate=1.0e-4")}
    few = ("iterations=1", "explore.per_iteration=4", "evaluate=null") if quick else ()
    for name, words in variants.items():
        time_online(f"135M, {name}, 128 episodes an iteration", (*words, *few))


VARIANTS = ("plain", "fsdp2", "fsdp2 with cpu_offload")


def sharding(quick: bool) -> None:
    """Train in one process with NCCL and FSDP2, with and without CPU offload, and compare with plain training."""
    with tempfile.TemporaryDirectory() as folder:
        for port, variant in enumerate(VARIANTS, start=29_511):
            ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [sys.executable, __file__, "sharding", "--variant", variant, "--folder", folder]
            subprocess.run(
                command,
                env={**os.environ, **(ranks if variant != "plain" else {})},
                check=True,
                stdout=sys.stderr,
                timeout=200,
            )
        plain, *others = (torch.load(Path(folder) / f"{variant}.pt") for variant in VARIANTS)
    for variant, found in zip(VARIANTS[1:], others, strict=True):
        losses = max(abs(a - b) for a, b in zip(found["losses"], plain["losses"], strict=True))
        weights = max(
            float((found["weights"][name] - each).abs().max()) for name, each in plain["weights"].items()
        )
        say(
            "training on one GPU by NCCL against one without, largest difference",
            f"{variant}, 3 steps, float32",
            {"loss": f"{losses:.1e}", "weights": f"{weights:.1e}"},
            gigabytes=found["gigabytes"],
            plain_gigabytes=plain["gigabytes"],
        )


def train_variant(variant: str, folder: Path) -> None:
    """Train three steps in this process, save a checkpoint, and store losses, weights and memory."""
    divided = fsdp2(variant != "fsdp2") if variant != "plain" else {}
    args = TurnConfig(
        loss={"name": "dpo"},
        max_steps=3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        reference_cache=tempfile.mkdtemp(),
        lr_scheduler_type="constant",
        **settings("float32", "cuda") | {"learning_rate": 1e-4, "output_dir": str(folder / f"out {variant}")},
        **divided,
    )
    model, tokenizer = make_model("15M", 8_192), make_tokenizer()
    trainer = TurnTrainer(model, args=args, train_dataset=ROWS * 12, processing_class=tokenizer)
    trainer.train()
    weights = whole_weights(trainer.model) if divided else trainer.model.state_dict()
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: weight.cpu() for name, weight in weights.items()},
        "gigabytes": round(torch.cuda.max_memory_allocated() / 1e9, 3),
    }
    torch.save(found, folder / f"{variant}.pt")


PARTS = {
    "attention": attention,
    "precision": precision,
    "memory": memory,
    "online": online,
    "sharding": sharding,
}


def main() -> None:
    """Parse the options, and run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        train_variant(options.variant, options.folder)
    else:
        PARTS[options.part](options.quick)


if __name__ == "__main__":
    main()
