"""Play agents against a policy that is a function: pieces that the tests of agents share."""

import json
from pathlib import Path

from perturn.envs.load_environment import make_environment
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.play_many import play
from perturn.episodes.seeds import make_jobs
from perturn.types import Action, Sampling

HERE = Path(__file__).parent
SHAKY = ["python", str(HERE / "shaky_agent.py")]
FUNCTION = f"{HERE / 'shaky_functions.py'}:rollout"


class Scripted:
    """A policy whose answer depends on the prompt alone."""

    name = "scripted"

    def __init__(self, say=lambda prompt: Action("go", (1, 2), (-0.5, -0.25))):
        self.say, self.prompts = say, []

    def generate(self, prompts, sampling):
        """Answer them."""
        self.prompts += prompts
        return [self.say(prompt) for prompt in prompts]

    def forget(self, conversation):
        """Nothing is kept."""

    def close(self):
        """Nothing is held."""


def agents(folder, rows, **settings):
    """The section `environment` of agents that play these rows."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "function" not in settings:
        settings.setdefault("command", SHAKY)
    return {"name": "agent", "tasks": str(folder / "tasks.jsonl"), **settings}


def played(section, policy=None, samples=1, protocol=PROTOCOLS["agent"], concurrency=8):
    """The episodes of all tasks, by key."""
    world = make_environment(section)
    jobs = make_jobs(world.tasks("train"), 0, samples)
    found = play(
        jobs,
        policy or Scripted(),
        lambda: make_environment(section),
        protocol=protocol,
        sampling=Sampling(),
        concurrency=concurrency,
    )
    return dict(sorted((one.key, one) for one in found))
