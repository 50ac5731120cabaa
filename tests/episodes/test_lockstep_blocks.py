"""Blocks in lock-step: what shares a batch is a function of the block, whatever the worlds take and lose."""

import random
import time
from dataclasses import dataclass

import pytest

from episodes.counting import PROTOCOL, Counter, Script, jobs, up
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.lockstep_blocks import blocks_of, play_blocks
from perturn.episodes.play_many import play
from perturn.errors import EngineFailure, WorldLost
from perturn.traits import EnvironmentTraits
from perturn.types import Action, Observation, Sampling, Status, Trajectory


def start(names, size, engine, make, **settings):
    """The trajectories to come."""
    blocks = blocks_of(jobs(*names), size)
    return play_blocks(
        blocks, engine, make, **{"protocol": PROTOCOL, "sampling": Sampling(), "retries": 1} | settings
    )


def asked(engine):
    """(conversation, turn) of the prompts of each batch."""
    return [[(each.conversation[0], len(each.turns)) for each in batch] for batch in engine.batches]


def long(prompt):
    """Three turns, of a task called c four."""
    waits = prompt.conversation[0] == "c" and not prompt.turns
    return Action("Action: wait") if waits else up(prompt)


class _Uneven(Counter):
    """Steps take 0 to 10 ms, by chance."""

    def step(self, action):
        time.sleep(random.random() / 100)
        return super().step(action)


LOCKED = [[(name, turn) for name in "abc"] for turn in range(3)] + [[("c", 3)]]
"""The batches of a block of a, b and c, of which c takes a turn more."""


def test_a_batch_is_a_turn_of_the_block_in_its_order():
    """Two blocks, of three and of one; the second begins when the first has ended."""
    engine, worlds = Script(long), []
    found = list(start("abcd", 3, engine, lambda: _Uneven(worlds)))

    assert asked(engine) == LOCKED + [[("d", turn)] for turn in range(3)]
    assert [one.task.id for one in found] == list("abcd")
    assert [one.success for one in found] == [True] * 4
    assert sorted(engine.forgotten) == [f"{name}#0" for name in "abcd"]
    assert len(worlds) == 3
    assert all(world.closed for world in worlds)


def test_nothing_of_a_block_is_handed_out_before_its_end():
    """The first trajectory, of a, waits until c has been answered for the last time."""
    engine = Script(long)
    found = start("abcd", 3, engine, Counter)
    next(found)

    assert asked(engine) == LOCKED
    found.close()


def test_an_episode_whose_world_is_lost_catches_up_with_the_others():
    """It is given the answers that it had: the batches are those of a play in which nothing was lost."""
    engine, lost = Script(long), [2, 1]

    class Mortal(Counter):
        def step(self, action):
            if self.seed == 1 and lost and self.count == lost[-1]:
                lost.pop()
                raise WorldLost("gone")
            return super().step(action)

    found = list(start("abc", 3, engine, Mortal, retries=2))

    assert lost == []
    assert asked(engine) == LOCKED
    assert [one.success for one in found] == [True] * 3
    assert found == list(start("abc", 3, Script(long), Counter))


def test_a_world_that_comes_back_otherwise_is_asked_for_anew():
    """Its old answers were to other prompts; it goes on beside the others, who wait for it in each turn."""
    engine, lives = Script(long), []

    class Changed(Counter):
        def reset(self, task, seed):
            posed = super().reset(task, seed)
            if task.id != "b":
                return posed
            lives.append(task)
            return Observation(f"life {len(lives)}", state_key="0")

        def step(self, action):
            if self.seed == 1 and len(lives) == 1 and self.count == 1:
                raise WorldLost("gone")
            return super().step(action)

    found = list(start("abc", 3, engine, Changed))

    assert asked(engine)[2:5] == [[("a", 2), ("b", 0), ("c", 2)], [("b", 1), ("c", 3)], [("b", 2)]]
    assert [one.success for one in found] == [True] * 3


def test_failures_end_their_own_episode_alone():
    """An engine's, a world's and a lost one's; the others go on in lock-step."""

    class Broken(Counter):
        def step(self, action):
            if self.seed == 0:
                raise WorldLost("gone")
            return super().step(action)

    engine = Script(lambda prompt: EngineFailure("too long") if prompt.conversation[0] == "b" else up(prompt))
    found = list(start(["a", "b", "broken", "c"], 4, engine, Broken))

    assert [one.status for one in found] == [Status.FAILED] * 3 + [Status.COMPLETED]
    assert asked(engine) == [[("a", 0), ("b", 0), ("c", 0)], [("c", 1)], [("c", 2)]]


class _Describes(Script):
    """An engine with abilities."""

    abilities = EngineAbilities(prompt_tokens={"a#0": 7})


class _PlaysItself(Counter):
    """An environment that notes the abilities it gets."""

    traits = EnvironmentTraits(plays_itself=True)

    def play(self, job, protocol, policy, abilities):
        """End at once."""
        self.worlds.append(abilities)
        return Trajectory(job.task, (), "counter", sample=job.sample, status=Status.FAILED, error="none")
        yield


def test_an_environment_that_plays_itself_gets_the_abilities_of_the_engine():
    """As in `play`, so that an agent program reads the same numbers of tokens."""
    engine, found = _Describes(up), []
    list(start("a", 1, engine, lambda: _PlaysItself(found)))

    assert engine.abilities in found


@pytest.mark.parametrize("made", [Counter, _PlaysItself])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_sampling_of_the_engine_decides_whether_an_episode_is_sharpened(made, temperature):
    """Also in an environment that plays itself, whose agent may send a temperature that a run ignores."""
    how = {"protocol": PROTOCOL, "sampling": Sampling(temperature)}
    blocks = play_blocks([jobs("a")], Script(up), lambda: made([]), **how)
    at_once = play(jobs("a"), Script(up), lambda: made([]), **how)

    assert {one.sharpened for one in (*blocks, *at_once)} == {temperature != 1}


def test_worlds_are_closed_when_the_engine_raises():
    """An engine that cannot answer at all stops the play with its own error."""

    def breaks(prompt):
        raise EngineFailure("out of memory")

    worlds = []
    with pytest.raises(EngineFailure, match="out of memory"):
        list(start("abcd", 2, Script(breaks), lambda: Counter(worlds)))

    assert [world.closed for world in worlds] == [True] * 2


@dataclass
class _Rooms(_Uneven):
    """Talks of rooms, longer ones in some episodes; ends after two to four steps."""

    def reset(self, task, seed):
        super().reset(task, seed)
        return Observation("a room " * (3 + 11 * (seed % 5)))

    def step(self, action):
        super().step("up")
        return Observation(f"room {self.count}", terminated=self.count == 2 + self.seed % 3)


def test_log_probabilities_of_two_plays_are_equal_to_the_bit(tiny_model, renderer):
    """Local engine, float32, blocks of 20, which is more than lie side by side in memory; worlds step in any order.

    The second play begins with the second block, as a run does that was killed in it.
    """
    sampling, names = Sampling(temperature=1.0, max_new_tokens=5), [f"t{n}" for n in range(45)]
    played = {}
    for first in (0, 20):
        engine = LocalEngine(tiny_model, renderer, cache_gigabytes=1e-3, speculate=False)
        blocks = blocks_of(jobs(*names), 20)[first // 20 :]
        how = {"protocol": PROTOCOL, "sampling": sampling}
        played[first] = {one.key: one for one in play_blocks(blocks, engine, _Rooms, **how)}
        engine.close()

    assert {key: played[0][key] for key in played[20]} == played[20]
    assert len(played[20]) == 25
