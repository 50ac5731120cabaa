r"""Compare handing over adapters and a merged model from training to the engine of an online run.

    python benchmarks/handover.py --out benchmarks/handover.json                       the local engine
    python benchmarks/handover.py --engine vllm --out benchmarks/handover_vllm.json    vLLM in this process

The policy is a Llama of random weights in float32, with adapters of rank 16 on all linear layers. As in the loop, each
way writes the policy to disk, names it by its digest, and gives it to an open engine. `merged` writes all weights, with
the adapters merged into them. `cpu_s` is the CPU time of this process, which hardly depends on other work on the
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from training_models import make_model, threads

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.config.sections import Lora
from perturn.engines.local.engine import LocalEngine
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.io.atomic_write import replacing
from perturn.policy.lora_adapters import lora_config, save_adapters
from perturn.policy.models import add_adapters, architecture, load_model, new_identity
from perturn.types import Prompt, Sampling

LORA = Lora()
PROMPT = Prompt((), (), ({"role": "user", "content": "Say something about the weather."},), 0, "one")


def adapted(base: Path, seed: int) -> Any:
    """Return the model with adapters whose weights look trained."""
    model = add_adapters(load_model(str(base)), lora_config(LORA), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.01, generator=generator)
    return model


def hand_over(engine: Any, base: Path, way: str, seed: int) -> dict[str, float]:
    """Give the engine a policy in one of the two ways. Return the bytes written, and the seconds of each part."""
    model, target = adapted(base, seed), base.parent / way
    began, spent = time.perf_counter(), time.process_time()
    with replacing(target) as fresh:
        if way == "adapters":
            save_adapters(model, fresh, str(base))
        else:
            model.merge_and_unload().save_pretrained(fresh)
    written = time.perf_counter()
    name = new_identity(way, str(target), architecture(str(base)), "float32")
    named = time.perf_counter()
    engine.update_weights(target, name, **({"base": str(base)} if way == "adapters" else {}))
    given = time.perf_counter()
    return {
        "bytes": sum(file.stat().st_size for file in target.iterdir()),
        "write_s": written - began,
        "name_s": named - written,
        "give_s": given - named,
        "seconds": given - began,
        "cpu_s": time.process_time() - spent,
    }


def said(engine: Any) -> torch.Tensor:
    """Return the log-probabilities of a greedy answer, in nats [tokens]."""
    answer = engine.generate([PROMPT], Sampling(max_new_tokens=16))[0]
    engine.forget("one")
    return torch.tensor(answer.logprobs)


def measure(size: str, kind: str, tries: int) -> dict[str, Any]:
    """Measure both ways in alternation. Return medians without the first try of each."""
    tokenizer = load_tokenizer("smollm2-135m")
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "checkpoints" / "sft"
        make_model(size, len(tokenizer)).save_pretrained(base)
        tokenizer.save_pretrained(base)
        if kind == "local":
            engine: Any = LocalEngine(load_model(str(base)), Renderer(tokenizer))
        else:
            settings = VllmSettings(cache_gigabytes=0.2, context=512, options={"enforce_eager": True})
            engine = VllmEngine(str(base), Renderer(tokenizer), settings, adapter_rank=LORA.rank)
        found: dict[str, list[dict[str, float]]] = {"adapters": [], "merged": []}
        difference = 0.0
        for number in range(tries + 1):
            answers = []
            for way, rows in found.items():
                rows.append(hand_over(engine, base, way, number))
                answers.append(said(engine))
            difference = max(difference, float((answers[0] - answers[1]).abs().max()))
        engine.close()
    ways = {
        way: {name: round(median(row[name] for row in rows[1:]), 3) for name in rows[0]}
        for way, rows in found.items()
    }
    return {"size": size, "engine": kind, **ways, "largest_difference_nats": difference}


def main() -> None:
    """Parse the options, measure, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--sizes", nargs="+", default=["0.9M", "135M"])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for size in given.sizes:
        rows.append(measure(size, given.engine, given.tries))
        print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        words = {"torch": torch.__version__, "threads": threads(), "rows": rows}
        given.out.write_text(json.dumps(words, indent=2) + "\n")


if __name__ == "__main__":
    main()
