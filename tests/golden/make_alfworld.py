"""Record how the official ALFWorld engine plays generated games, for `tests/envs/test_alfworld.py`.

    pip install -e ".[alfworld]" && python tests/golden/make_alfworld.py

Each recording holds the problem itself, so it does not depend on the generator. Made with alfworld 0.4.2, textworld
1.7.0 and fast-downward-textworld 20.6.4.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perturn.envs.alfworld.games import KINDS, GameText
from perturn.envs.alfworld.generate import make_game
from perturn.envs.alfworld.official import OfficialGame
from perturn.types import Observation

FILE = Path(__file__).with_name("alfworld.json.xz")
_ODD = ("", " look ", "fly to the moon", "take everything", "Go to fridge 1", "examine fridge 1")
_IDLE = ("go", "examine", "help", "look", "inventory", "close")


def wander(
    walkthrough: Sequence[str], turns: int, dice: random.Random
) -> Generator[str, tuple[str, ...], None]:
    """Actions: some at random, with a taste for those that change something, and a walkthrough at the end.

    Args:
        walkthrough: A solution from the start; where random actions went before, some of it may be impossible.
        turns: How many random actions.
        dice: What chooses.
    """
    admissible = yield "look"
    for _ in range(turns):
        busy = [each for each in admissible if each.split()[0] not in _IDLE]
        chance = dice.random()
        if chance < 0.05:
            admissible = yield dice.choice(_ODD)
        elif chance < 0.12:
            admissible = yield dice.choice(("look", "inventory"))
        else:
            admissible = yield dice.choice(busy if busy and chance < 0.6 else admissible)
    for action in walkthrough:
        admissible = yield action


def play(
    game: Any, text: GameText, actions: Generator[str, tuple[str, ...], None]
) -> list[tuple[str, Observation]]:
    """What a game answers: (action, observation) a turn, the first without an action."""
    seen = game.reset(text)
    record = [("", seen)]
    action = next(actions)
    try:
        while not seen.terminated:
            seen = game.step(action)
            record.append((action, seen))
            action = actions.send(seen.admissible)
    except StopIteration:
        pass
    return record


def _rows(record: Sequence[tuple[str, Observation]]) -> list[Any]:
    """A recording as JSON: action, text, commands that came, commands that went, reward, valid."""
    rows, known = [], set[str]()
    for action, seen in record:
        now = set(seen.admissible)
        assert list(seen.admissible) == sorted(now)
        rows.append([action, seen.text, sorted(now - known), sorted(known - now), seen.reward, seen.valid])
        known = now
    return rows


def main() -> None:
    """Record two games of each kind: one solved at once, one wandered in first."""
    engine, games = OfficialGame(), []
    for number in range(2 * len(KINDS)):
        text = make_game("valid_unseen", number)
        wandering = 30 if number >= len(KINDS) else 0
        record = play(engine, text, wander(text.walkthrough, wandering, random.Random(number)))
        kept = replace(text, walkthrough=())
        games.append({"id": kept.id, "task": kept.task, "problem": kept.problem, "turns": _rows(record)})
        print(text.id, len(record), record[-1][1].success)
    with lzma.open(FILE, "wt", preset=9 | lzma.PRESET_EXTREME, encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(game) for game in games) + "\n]\n")


if __name__ == "__main__":
    main()
