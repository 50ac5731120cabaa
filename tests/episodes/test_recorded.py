"""The bench of real agents plays what was recorded, turn by turn."""

import importlib.util
import sys
from pathlib import Path

import pytest

from perturn.episodes.episode import episode
from perturn.episodes.prompts import system_prompt
from perturn.types import Action, EpisodeProtocol, Observation, Task

FILE = Path(__file__).parents[2] / "benchmarks" / "agents_side.py"
EXAMPLE = ({"role": "user", "content": "a door"}, {"role": "assistant", "content": "Action: open"})


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("agents_side", FILE)
    sys.modules["agents_side"] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Doors:
    """Says which door it is at; behind so many there is nothing."""

    name = "doors"

    def reset(self, task, seed):
        """Stand at the first."""
        self.door, self.doors = 0, task.data["doors"]
        return Observation("door 0")

    def step(self, action):
        """Open it."""
        self.door += 1
        return Observation(f"door {self.door}", terminated=self.door == self.doors)


def played(bench, env, job, protocol, text):
    """The trajectory of a policy that always says one thing, and the prompts it was given."""
    steps = episode(env, job, protocol=protocol)
    prompts = [next(steps)]
    while True:
        try:
            prompts.append(steps.send(Action(text)))
        except StopIteration as end:
            return end.value, prompts


@pytest.mark.parametrize("system", ["Open doors.", ""])
@pytest.mark.parametrize("said", ["Action: knock", "no action at all"])
def test_a_recorded_episode_is_told_again_whatever_is_answered(bench, system, said):
    """Three and five doors, under a system text and a worked example; as many turns even where the format is broken."""
    protocol = EpisodeProtocol("doors", "action", system=system, example=EXAMPLE)
    recorded = [
        played(bench, Doors(), bench.Job(Task(f"t/{n}", data={"doors": n}), 0), protocol, "Action: open")[0]
        for n in (3, 5)
    ]
    rules = bench.rules_of(recorded)

    assert system_prompt(rules) == system_prompt(protocol)
    for job, one in zip(bench.jobs_of(recorded, 1, 0), recorded, strict=True):
        again, prompts = played(bench, bench.Recorded(), job, rules, said)
        assert len(again.turns) == len(one.turns)
        assert prompts[0].messages == one.prompt
        if said.startswith("Action"):
            assert [turn.observation for turn in again.turns] == [turn.observation for turn in one.turns]


def test_rounds_and_seeds_give_every_episode_draws_of_its_own(bench):
    """Two episodes, three rounds, two seeds of the play: twelve conversations, no two with one seed."""
    protocol = EpisodeProtocol("doors", "action")
    recorded = [
        played(bench, Doors(), bench.Job(Task("t/1", data={"doors": 2}), 0), protocol, "Action: open")[0]
    ] * 2

    jobs = [job for seed in (0, 1) for job in bench.jobs_of(recorded, 3, seed)]

    assert len({job.seed for job in jobs}) == 12
    assert len({job.conversation for job in jobs[:6]}) == 6
