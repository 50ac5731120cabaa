"""Measure HotpotQA and WebShop: steps per second, time to build and to open the index, memory of an environment.

    python benchmarks/environments_text.py [--json] [--paragraphs 100000] [--products 10000]

The corpus and the catalogue are generated from a seed, in any size. Each case runs in two fresh processes: one builds
the index, and the other opens it, plays, and measures its memory. There is no comparison with the originals, because
HotpotQA's is a live website, and WebShop's package needs Python 3.8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from perturn.config.parsing import parse
from perturn.envs.hotpotqa.environment import HotpotQA
from perturn.envs.webshop.environment import WebShop
from perturn.types import Environment, Task

STEPS = 2000
_SYLLABLES = "ba ke lo mi nu ra so ti va zen dor fel gim hul jas kor lim mor nas pel".split()  # noqa: SIM905
_MEGABYTE = 2**20

Row = dict[str, Any]


def hotpotqa(paragraphs: int = 100_000) -> Row:
    """Measure searches by title and by words, look-ups and answers."""
    return _measured("hotpotqa", paragraphs)


def webshop(products: int = 10_000) -> Row:
    """Measure the scripted buyer, with a look at each subpage."""
    return _measured("webshop", products)


CASES: dict[str, Callable[..., Row]] = {"hotpotqa": hotpotqa, "webshop": webshop}
"""Name of each case, with the function that measures it for a number of documents."""


def _measured(case: str, size: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PERTURN_CACHE"] = f"{folder}/cache"
        settings = _write_wiki(Path(folder), size) if case == "hotpotqa" else _write_shop(Path(folder), size)
        built, played = (
            json.loads(
                subprocess.run(
                    [sys.executable, __file__, "--child", case, json.dumps(settings)],
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                ).stdout
            )
            for _ in range(2)
        )
    return {
        "case": case,
        "documents": size,
        "steps_per_second": played["steps_per_second"],
        "build_s": built["open_s"],
        "load_ms": played["open_s"] * 1000,
        "memory_mb": played["memory_mb"],
        "memory_mb_of_another": played["memory_mb_of_another"],
        "n": STEPS,
        "steps_ratio": None,
        "load_ratio": None,
    }


def _child(case: str, settings: dict[str, Any]) -> Row:
    """Open an environment, play in it, and open another one."""
    make: Callable[[], Environment] = partial(parse, HotpotQA if case == "hotpotqa" else WebShop, settings)
    make_imports()
    before = _memory()
    began = time.perf_counter()
    world = make()
    tasks = world.tasks("train")
    world.reset(tasks[0], 0)
    opened = time.perf_counter() - began
    first = _memory() - before
    steps = _play_hotpotqa if case == "hotpotqa" else _play_webshop
    took = _steps_time(itertools.islice(steps(world, list(tasks)), STEPS), world)
    before = _memory()
    another = make()
    another.reset(tasks[0], 0)
    return {
        "open_s": opened,
        "steps_per_second": STEPS / took,
        "memory_mb": first / _MEGABYTE,
        "memory_mb_of_another": (_memory() - before) / _MEGABYTE,
    }


def make_imports() -> None:
    """Import the libraries of the environments, so that imports do not count as opening."""
    import bm25s  # noqa: F401
    import rapidfuzz  # noqa: F401
    import Stemmer  # noqa: F401


def _steps_time(actions: Iterator[tuple[Task | None, str]], world: Environment) -> float:
    """Return the seconds of the steps, without resets and without choosing actions."""
    total = 0.0
    for task, action in actions:
        if task is not None:
            world.reset(task, 0)
        began = time.perf_counter()
        world.step(action)
        total += time.perf_counter() - began
    return total


def _play_hotpotqa(world: Environment, tasks: list[Task]) -> Iterator[tuple[Task | None, str]]:
    while True:
        for task in tasks:
            words = str(task.data["question"]).split()
            yield task, f"search[{' '.join(words[:6])}]"
            yield None, f"search[{task.data['answer']}]"
            yield None, f"lookup[{words[0]}]"
            yield None, f"finish[{words[1]}]"


def _play_webshop(world: Any, tasks: list[Task]) -> Iterator[tuple[Task | None, str]]:
    while True:
        for task in tasks:
            search, *rest, buy = world.expert(task)
            yield task, search
            yield from ((None, action) for action in rest)
            for page in ("description", "features", "reviews"):
                yield None, f"click[{page}]"
                yield None, "click[< prev]"
            yield None, buy


def _write_wiki(folder: Path, size: int) -> dict[str, Any]:
    """Write a corpus of random words with natural frequencies, and questions about its sentences."""
    words, draw = _words()
    with (folder / "corpus.jsonl").open("w") as file:
        for number in range(size):
            text = ". ".join(" ".join(draw(15)) for _ in range(4)) + "."
            file.write(json.dumps({"title": f"{words[number % 500]} {number}", "text": text}) + "\n")
    rows = [
        {"question": " ".join(draw(12)), "answer": f"{words[number % 500]} {number}"}
        for number in range(0, size, max(1, size // 200))
    ]
    (folder / "questions.json").write_text(json.dumps(rows))
    return {"questions": {"train": str(folder / "questions.json")}, "corpus": str(folder / "corpus.jsonl")}


def _write_shop(folder: Path, size: int) -> dict[str, Any]:
    """Write a catalogue of random words, with options for each product, and goals for 200 products."""
    _, draw = _words()
    products, attributes, goals = [], {}, {}
    for number in range(size):
        asin = f"P{number:09}"
        values = [{"value": " ".join(draw(2))} for _ in range(4)]
        product = {
            "asin": asin,
            "name": " ".join(draw(12)),
            "category": "garden",
            "query": " ".join(draw(2)),
            "product_category": " › ".join(draw(3)),
            "pricing": f"${1 + number % 90}.50",
            "full_description": " ".join(draw(80)),
            "small_description": [" ".join(draw(15)) for _ in range(5)],
            "customization_options": {"style": values},
        }
        products.append(product)
        attributes[asin] = {"attributes": [" ".join(draw(2)) for _ in range(4)]}
        if number % max(1, size // 200) == 0:
            said = f"i want {' '.join(str(product['name']).split()[:6])}"
            chosen = attributes[asin]["attributes"][:2]
            goals[asin] = [
                {
                    "instruction": said,
                    "instruction_attributes": chosen,
                    "instruction_options": [values[0]["value"]],
                }
            ]
    for name, content in (("products", products), ("attributes", attributes), ("goals", goals)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    files = {name: str(folder / f"{name}.json") for name in ("products", "attributes", "goals")}
    return {"files": files, "splits": {"train": (0, None)}}


def _words(count: int = 50_000) -> tuple[list[str], Callable[[int], list[str]]]:
    """Return random words, and a function that draws a number of them."""
    chance = random.Random(0)
    words = ["".join(chance.choices(_SYLLABLES, k=chance.randint(1, 4))) for _ in range(count)]
    cumulative = list(itertools.accumulate(1 / (rank + 10) for rank in range(count)))
    return words, lambda number: chance.choices(words, cum_weights=cumulative, k=number)


def _memory() -> int:
    """Return the memory in bytes that belongs only to this process. Mapped files count only where they are changed."""
    used: int = psutil.Process().memory_full_info().uss
    return used


def main() -> None:
    """Measure all cases, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--paragraphs", type=int, default=100_000)
    parser.add_argument("--products", type=int, default=10_000)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(_child(given.child[0], json.loads(given.child[1]))))
        return
    for case, size in (("hotpotqa", given.paragraphs), ("webshop", given.products)):
        row = CASES[case](size)
        print(json.dumps(row) if given.json else "  ".join(f"{key} {_short(row[key])}" for key in row))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
