"""Count the tokens that a policy reads to resume branches, and the tokens without sharing between branches.

    ALFWORLD_DATA=... python benchmarks/branch_prefix.py RUN [--episodes 16] [--every 5]

RUN is a finished run with an exploration. Its SFT policy, or else its base model, resumes the explored episodes from
every few turns, once and four times. All branches run at the same time in the local engine. The first count is the
number of tokens that go through the model. `fewest` is the smallest possible number, which counts every common
beginning once. `alone` sums the tokens that each branch has read and written.
"""

import argparse
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from perturn.chat.model_names import load_tokenizer
from perturn.chat.templates import chat_template
from perturn.chat.tokens import Renderer
from perturn.config.stages import policy_of
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.episodes.play_many import play
from perturn.explore.branching import branch_jobs
from perturn.run.protocol_rules import make_protocol
from perturn.run.served_policy import serve_policy
from perturn.run.session import world_maker
from perturn.types import failed


def main() -> None:
    """Play the branches, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--every", type=int, default=5)
    asked = parser.parse_args()
    recipe, paths = resolve_recipe(asked.run), RunPaths(asked.run)
    recipe = replace(recipe, engine={"name": "local", "speculate": False})  # speculated tokens count too
    path, template = str(paths.checkpoint(policy_of(recipe, 0))), chat_template(recipe.model)
    renderer = Renderer(load_tokenizer(path), template)
    file = paths.trajectories(f"explore{paths.marks[0]}")
    explored = sorted(read_trajectories(file), key=lambda one: one.key)[: asked.episodes]
    print(
        f"{'samples':>8}{'branches':>9}{'through the model':>18}{'fewest':>8}{'alone':>8}{'ratio':>7}{'seconds':>9}"
    )
    for samples in (1, 4):
        engine = serve_policy(recipe, "sft", template, None, path)
        fed = [0]
        embedding = engine._model.get_input_embeddings()
        embedding.register_forward_hook(
            lambda _, given, __, fed=fed: fed.__setitem__(0, fed[0] + given[0].numel())
        )
        turns = {
            one.key: range(asked.every, len(one.turns), asked.every) for one in explored if not failed(one)
        }
        begun = [one for one in explored if one.key in turns]
        jobs = branch_jobs(begun, turns, recipe.seed, branches=samples, samples=8)
        began = time.perf_counter()
        how = {"protocol": make_protocol(recipe.protocol), "sampling": recipe.explore.sampling}
        played = list(play(jobs, engine, world_maker(recipe), **how, concurrency=len(jobs)))
        took = time.perf_counter() - began
        engine.close()
        read = [renderer.encode(one).ids for one in played]
        alone, least = sum(map(len, read)), fewest(read)
        print(f"{samples:>8}{len(jobs):>9}{fed[0]:>18}{least:>8}{alone:>8}{fed[0] / alone:>7.2f}{took:>9.1f}")


def fewest(rows: list[tuple[int, ...]]) -> int:
    """Return the number of tokens in all rows, with common beginnings counted once."""
    rows = sorted(rows)
    same = [
        next((i for i, (a, b) in enumerate(zip(*two, strict=False)) if a != b), min(map(len, two)))
        for two in pairwise(rows)
    ]
    return sum(map(len, rows)) - sum(same)


if __name__ == "__main__":
    main()
