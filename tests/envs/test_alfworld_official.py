"""ALFWorld's reader against the official engine, turn by turn. CI has no such engine and skips this.

    pip install -e ".[dev,alfworld]" && pytest tests/envs/test_alfworld_official.py

The games are real ones where `$PERTURN_DATA/alfworld` or `../shared/data/alfworld` has them, and generated ones else.
"""

import importlib.util
import json
import os
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.envs.alfworld.environment import ALFWorld
from perturn.envs.alfworld.game_settings import TextGame
from perturn.envs.alfworld.game_text import GRAMMARS
from perturn.envs.alfworld.games import KINDS
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.envs.alfworld.official import ALFWorldOfficial, OfficialGame
from perturn.envs.environment_check import check_environment
from perturn.errors import EnvironmentFailure

GAMES_A_KIND = 11
WANDERING = 40
needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("alfworld") is None,
    reason='the official engine is not installed: pip install "perturn[alfworld]" (compiles for minutes)',
)


@pytest.fixture(scope="module")
def golden():
    """The module that records games; it has the actions and the play."""
    path = Path(__file__).parents[1] / "golden" / "make_alfworld.py"
    spec = importlib.util.spec_from_file_location("make_alfworld", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not ours
        yield OfficialGame()


def games_of(kind):
    """Real games of a kind where there are some, from three splits; generated ones else."""
    root = Path(os.environ.get("PERTURN_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (root / "alfworld").is_dir():
        world = ALFWorldLike(kinds=(kind,))
        return [world.game(task) for task in world.tasks("train")[:GAMES_A_KIND]]
    world = ALFWorld(str(root / "alfworld"), kinds=(kind,))
    tasks = [task for split in ("valid_seen", "valid_train") for task in world.tasks(split)]
    return [world.game(task) for task in random.Random(kind).sample(tasks, GAMES_A_KIND)]


def compare(kind, grammar, games, golden, engine):
    """Play games in both engines; how many answers were compared."""
    ours, count = TextGame(GRAMMARS[grammar]), 0
    for number, game in enumerate(games):
        put = GRAMMARS[grammar].put.format(object=r"\1", receptacle=r"\2")
        walk = [re.sub(r"^move (.*) to (.*)$", put, action) for action in game.walkthrough]
        wandering = WANDERING if number % 3 else 0
        records = [
            golden.play(side, game, golden.wander(walk, wandering, random.Random(game.id)))
            for side in (engine, ours)
        ]
        for (action, theirs), (_, mine) in zip(*records, strict=True):
            for part in ("text", "admissible", "reward", "valid", "terminated", "success"):
                assert getattr(mine, part) == getattr(theirs, part), (game.id, action, part)
        assert wandering or records[1][-1][1].success
        count += len(records[0])
    print(f"{kind}, grammar {grammar}: {len(games)} games, {count} answers, no difference")
    return count


@pytest.mark.slow
@needs_engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_answer_alike(kind, golden, engine):
    """Texts, commands, rewards, validity and ends, at random and along walkthroughs; no difference is excused."""
    assert compare(kind, "0.4", games_of(kind), golden, engine) > 10 * GAMES_A_KIND


@pytest.mark.slow
@needs_engine
@pytest.mark.filterwarnings("ignore")
def test_both_engines_answer_alike_in_the_grammar_of_old(golden):
    """The installed logic, turned into what it was in 0.3.3: `put X in/on Y`, places' names on arrival, no `help`."""
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    for new, old in (
        ("You arrive at {r.name}.", "You arrive at {lend.name}."),
        ("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."),
        ('"move {o} to {r}"', '"put {o} in/on {r}"'),
    ):
        assert new in grammar
        grammar = grammar.replace(new, old)
    engine = OfficialGame((domain.partition("(:action help")[0] + ")", grammar.partition("action help {")[0]))
    for kind in KINDS:
        games = [replace(game, logic=None) for game in games_of(kind)[:2]]
        assert compare(kind, "0.3", games, golden, engine) > 10


@needs_engine
@pytest.mark.filterwarnings("ignore")
def test_official_engine_keeps_the_contract(tmp_path):
    """With its own game file; its name says the versions of all that plays."""
    game = ALFWorldLike().game(ALFWorldLike().tasks("train")[1])
    file = tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-x" / "trial_1" / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(OfficialGame().game_data(game)))

    assert check_environment(lambda: ALFWorldOfficial(str(tmp_path)), episodes=1) == []
    assert ALFWorldOfficial(str(tmp_path)).name.startswith("alfworld-official-alfworld-0.")


@pytest.mark.skipif(not needs_engine.args[0], reason="the official engine is installed")
def test_missing_engine_is_said_with_the_remedy():
    with pytest.raises(
        EnvironmentFailure, match=r'pip install "perturn\[alfworld\]".* or play the same games'
    ):
        ALFWorldOfficial()
