"""Failed episodes of an ALFWorld game, and runs that correct them."""

from dataclasses import replace

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.store import TrajectoryStore
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.episodes.episode import episode
from perturn.episodes.play_many import Job
from perturn.episodes.replay import play_script
from perturn.errors import EngineFailure
from perturn.run.protocol_rules import make_protocol
from perturn.types import Action

RECIPE = {
    "name": "x",
    "model": {"name": "base"},
    "environment": {"name": "alfworld-like"},
    "protocol": {"name": "alfworld-lab"},
    "base": {"tasks": {"n": 8}},
    "rows": {"name": "corrections", "distance": "searching"},
}


TASK = ALFWorldLike().tasks("train")[1]
"""Task in which the pillow on armchair 2 must go to sofa 1. The expert looks at the sofa first."""


RIGHT = [
    "go to sofa 1",
    "go to armchair 2",
    "take pillow 1 from armchair 2",
    "go to sofa 1",
    "move pillow 1 to sofa 1",
]


STRAYED = [*RIGHT[:3], "go to tvstand 1", "I wonder.", "move pillow 1 to tvstand 1"]
"""Commands whose first wrong turn is the fourth."""


def make_recipe(**sections):
    return parse(Recipe, RECIPE | sections)


PROTOCOL = make_protocol(make_recipe().protocol)


def record(commands, task=TASK, sample=0):
    """Return a policy's episode whose actions have token ids, and which ends at a turn limit."""
    texts = [command if command.startswith("I ") else f"Action: {command}" for command in commands]
    script = [Action(text, token_ids=(index,)) for index, text in enumerate(texts)]
    rules = replace(PROTOCOL, max_turns=len(script))
    steps = episode(ALFWorldLike(), Job(task, 7, sample), protocol=rules, policy="sft@1")
    return play_script(steps, script, EngineFailure("no more"))


def commands(trajectory):
    return [turn.action.text.removeprefix("Action: ") for turn in trajectory.turns]


def explore(run, stage, episodes):
    """Write episodes as the result of a stage."""
    file = run.paths.trajectories(stage)
    with run.stage(stage, file), TrajectoryStore(file) as store:
        for one in episodes:
            store.append(one)
