r"""Count the training tokens of an episode, by the length of the history in its prompts and by prefix sharing.

    python benchmarks/histories.py --alfworld data/alfworld --out benchmarks/histories.json

The episodes are expert episodes of real games, under the protocols of the library, in tokens of SmolLM2. `one` is the
whole episode as one sequence. `alone` has a sequence for each turn, with the prompt that the policy saw, and computes
each separately. `shared` has the same sequences, but computes common beginnings once, as training packs them. A number
is the mean number of tokens per episode that go through the model. `growth` has the longest episodes, cut after several
numbers of turns.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Encoded, Renderer
from perturn.envs.alfworld.alfworld_protocols import ALFWORLD_ETO, ALFWORLD_GIGPO
from perturn.envs.load_environment import make_environment
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.play_many import Job
from perturn.policy.packing import lay_out
from perturn.run.stages.collect_stage import demonstrate
from perturn.types import EpisodeProtocol, Trajectory, succeeded

HISTORIES = (None, 8, 4, 2, 0)
CUTS = (5, 10, 20, 40)


def played(settings: dict[str, Any], split: str, protocol: EpisodeProtocol, count: int) -> list[Trajectory]:
    """Return the successful expert episodes of tasks that are spread over a split."""
    with closing(make_environment(settings)) as env:
        tasks = env.tasks(split)
        chosen = tasks[:: max(1, len(tasks) // count)][:count]
        episodes = [demonstrate(env, Job(task, seed=0), protocol) for task in chosen]
    return [one for one in episodes if succeeded(one)]


def by_turn(trajectory: Trajectory) -> Trajectory:
    """Return an episode with a sequence for each turn. If its policy saw the whole history, each sequence holds it."""
    if not trajectory.is_one_sequence:
        return trajectory
    turns = tuple(replace(turn, recalled=turn.recalled or turn.observation) for turn in trajectory.turns)
    return replace(trajectory, turns=turns, history=trajectory.history or len(turns))


def tokens(encoded: Sequence[Encoded], share: bool) -> float:
    """Return the mean number of tokens per episode that go through the model."""
    return round(mean(len(lay_out([one], share=share)["ids"]) for one in encoded), 1)


def measure(episodes: Sequence[Trajectory], renderer: Renderer) -> dict[str, float]:
    """Return the mean number of tokens per episode in each form."""
    whole = [renderer.encode(replace(one, history=None)) for one in episodes]
    parts = [renderer.encode(by_turn(one)) for one in episodes]
    return {
        "episodes": len(episodes),
        "turns": round(mean(one.turns for one in whole), 1),
        "one": tokens(whole, share=True),
        "alone": tokens(parts, share=False),
        "shared": tokens(parts, share=True),
    }


def rows(name: str, episodes: Sequence[Trajectory], renderer: Renderer) -> Iterator[dict[str, Any]]:
    """Yield a row for each history length; only for the protocol's own length if commands were listed in the prompt."""
    listed = any(turn.recalled is not None for one in episodes for turn in one.turns)
    for history in {one.history for one in episodes} if listed else HISTORIES:
        seen = [replace(one, history=history) for one in episodes]
        yield {"episodes of": name, "history": history, **measure(seen, renderer)}


def growth(episodes: Sequence[Trajectory], renderer: Renderer) -> Iterator[dict[str, Any]]:
    """Yield rows for the longest episodes, cut after some turns, with the whole history and with two turns."""
    long = [one for one in episodes if len(one.turns) >= CUTS[-1]]
    for history in (None, 2) if long else ():
        for cut in CUTS:
            seen = [replace(one, turns=one.turns[:cut], history=history) for one in long]
            yield {"history": history, **measure(seen, renderer)}


def main() -> None:
    """Play, count, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--alfworld",
        default=os.environ.get("ALFWORLD_DATA"),
        help="its games; without them ScienceWorld alone",
    )
    parser.add_argument("--episodes", type=int, default=40, help="of each environment")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    options = parser.parse_args()
    renderer = Renderer(load_tokenizer("smollm2-135m"))
    science = played({"name": "scienceworld"}, "eto-train", PROTOCOLS["scienceworld-eto"], options.episodes)
    found = list(rows("scienceworld, scienceworld-eto", science, renderer))
    if options.alfworld:
        games = {"name": "alfworld", "data": options.alfworld}
        for protocol in (ALFWORLD_ETO, ALFWORLD_GIGPO):
            episodes = played(games, "valid_seen", protocol, options.episodes)
            found += rows(f"alfworld, {protocol.name}", episodes, renderer)
    text = json.dumps({"rows": found, "growth": list(growth(science, renderer))}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
