"""A policy of 0.93M parameters that solves over half of ALFWorld's games, made from scratch in ten minutes of one core.

    PERTURN_DATA=... python benchmarks/online/make_base.py runs/online

writes OUT/episodes (the tokenizer, and episodes of the expert and of a clumsy one on the train games, as tokens),
OUT/base (a Llama trained on all their tokens), and OUT/sft-N (that, taught the actions of 1500 expert episodes through
`perturn run`, seeds 0, 1, 2, scored on valid_seen). A stage that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from words import make_tokenizer, save_tokenizer

from episodes import PROTOCOL, solved, wander
from perturn.envs.alfworld.environment import ALFWorld
from perturn.episodes.formats import FORMATS
from perturn.io.writing import replacing
from perturn.run.loop import open_run, run_stages

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
EPOCHS, BATCH, RATE, BETAS, WARMUP = 2.5, 16, 2.5e-3, (0.9, 0.98), 0.03
NOISY = 2
"""Clumsy episodes of each game."""
_SORTED = 16
"""Batches that are filled from one sorted heap, so that episodes of like length come together."""


def make_episodes(env: ALFWorld, folder: Path) -> None:
    """Play the train games; writes the tokenizer, and `episodes.json`: token ids [episodes][tokens]."""
    tasks = env.tasks("train")
    conversations = [found.messages for found in solved(env, tasks, NOISY)]
    form = FORMATS[PROTOCOL.format]
    texts = {form.reminder, *wander(env, tasks)}
    texts |= {str(message["content"]) for each in conversations for message in each}
    tokenizer = make_tokenizer(sorted(texts), SHAPE["max_position_embeddings"])
    save_tokenizer(tokenizer, folder, sorted(texts))
    ids = [tokenizer.apply_chat_template(each, return_dict=False) for each in conversations]
    (folder / "episodes.json").write_text(json.dumps(ids))
    tokens = sum(map(len, ids))
    say(f"{len(ids)} episodes, {tokens / len(ids):.0f} tokens each, vocabulary {len(tokenizer)}")


def train_base(source: Path, folder: Path, seed: int = 0) -> None:
    """Train a Llama from scratch on all tokens of the episodes."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids: list[list[int]] = json.loads((source / "episodes.json").read_text())
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            **SHAPE,
        )
    )
    say(f"{sum(each.numel() for each in model.parameters()) / 1e6:.3f}M parameters")
    steps = int(EPOCHS * len(ids) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    began, seen, losses = time.monotonic(), 0, []
    for step, batch in zip(range(steps), batches(ids, random.Random(seed)), strict=False):
        loss = all_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += sum(map(len, batch))
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            pace = seen / (time.monotonic() - began)
            say(f"step {step}/{steps}: {mean(losses[-50:]):.4f} nats a token, {pace:.0f} tokens/s")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short rise, then half a cosine."""
    rise = WARMUP * steps
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


def batches(ids: Sequence[list[int]], draw: random.Random) -> Iterator[list[list[int]]]:
    """Batches without end, each epoch in another order; those of one batch are of like length."""
    while True:
        order = draw.sample(range(len(ids)), len(ids))
        heap = BATCH * _SORTED
        found = []
        for start in range(0, len(order), heap):
            part = sorted(order[start : start + heap], key=lambda index: len(ids[index]))
            found += [part[at : at + BATCH] for at in range(0, len(part), BATCH)]
        draw.shuffle(found)
        yield from ([ids[index] for index in each] for each in found)


def all_token_loss(model: Any, batch: Sequence[list[int]]) -> torch.Tensor:
    """Mean negative log-likelihood of the tokens after the first, in nats; a scalar."""
    longest = max(map(len, batch))
    rows = torch.tensor([[*each, *[-100] * (longest - len(each))] for each in batch])
    logits = model(input_ids=rows.clamp_min(0), use_cache=False).logits  # causal, so padding is not seen
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-100)


def teach(base: Path, out: Path, seed: int) -> None:
    """SFT on the actions of the expert, and a score on valid_seen, by the recipe beside this file."""
    words = [f"model.name={base}", f"output={out}", f"name=sft-{seed}", f"seed={seed}"]
    with open_run(Path(__file__).with_name("sft.yaml"), words) as run:
        run_stages(run)


def say(text: str) -> None:
    """Print a line at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    """Make what is not there yet."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out", type=Path)
    words.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    args = words.parse_args()
    torch.set_num_threads(1)
    if "PERTURN_DATA" in os.environ:
        os.environ.setdefault("ALFWORLD_DATA", f"{os.environ['PERTURN_DATA']}/alfworld")
    out = args.out.resolve()
    if not (out / "episodes").exists():
        with replacing(out / "episodes") as fresh:
            fresh.mkdir()
            make_episodes(ALFWorld(), fresh)
    if not (out / "base").exists():
        with replacing(out / "base") as fresh:
            train_base(out / "episodes", fresh)
    for seed in args.seeds:
        teach(out / "base", out, seed)


if __name__ == "__main__":
    main()
