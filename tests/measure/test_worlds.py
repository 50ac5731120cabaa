"""How worlds answer episodes that are played again, and what continuations then begin with."""

# ruff: noqa: D101, D102
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from perturn.episodes.episode import Job
from perturn.episodes.play_many import play
from perturn.errors import ContextFull, RunError
from perturn.measure.advantages import measure, returns_of
from perturn.measure.forecast import expected_width, forecast
from perturn.measure.points import Continuation, ContinuationFile, Point, choose, plan, read_continuations
from perturn.measure.worlds import WorldCheck, check_world
from perturn.types import Action, EpisodeProtocol, Observation, Sampling, Status, Task, Trajectory, Turn

PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=3)


class Coins:
    """Three turns; `toss` shows a coin of the world's own, of its seed, or always heads, and `wait` shows nothing."""

    name = "coins-1.0"
    coin = "own"

    def tasks(self, split):
        return [Task(f"{split}/{n}") for n in range(4)]

    def reset(self, task, seed):
        self.turn, self.heads = 0, 0
        self.random = random.Random(seed) if self.coin == "seed" else random
        return Observation("Toss or wait.")

    def step(self, action):
        self.turn += 1
        shown = action == "toss" and (self.coin == "none" or self.random.random() < 0.5)
        self.heads += shown
        last = self.turn == 3
        return Observation(
            "Heads." if shown else "Nothing.", float(self.heads > 0 and last), last, bool(self.heads and last)
        )

    def close(self):
        pass


class Seeded(Coins):
    coin = "seed"


class Fixed(Coins):
    coin = "none"


class Player:
    """Tosses or waits, by the seed of the prompt."""

    name = "player"

    def generate(self, prompts, sampling):
        return [
            Action(f"Action: {random.Random(each.seed).choice(['toss', 'wait', 'wait'])}") for each in prompts
        ]

    def forget(self, conversation):
        pass

    def close(self):
        pass


class Waiting(Player):
    """Waits."""

    def generate(self, prompts, sampling):
        return [Action("Action: wait")] * len(prompts)


def played(kind, jobs):
    return sorted(play(jobs, Player(), kind, protocol=PROTOCOL, sampling=Sampling()), key=lambda one: one.key)


def episodes_of(kind, samples=4):
    return played(kind, [Job(task, 7 * n, n) for n in range(samples) for task in kind().tasks("train")])


@pytest.mark.parametrize(("world", "kind"), [(Coins, "open"), (Seeded, "seeded"), (Fixed, "deterministic")])
def test_a_world_is_known_by_what_it_answers(world, kind):
    random.seed(0)
    episodes = episodes_of(world)

    found = check_world(world(), episodes, PROTOCOL)
    assert found.kind == kind
    assert check_world(world(), episodes, PROTOCOL, has_user=True).kind == "open"


def test_a_world_that_never_comes_back_is_rejected():
    class Other(Fixed):
        def reset(self, task, seed):
            super().reset(task, seed)
            return Observation(f"Toss or wait. {random.random()}")

    with pytest.raises(RunError, match="cannot be restored"):
        check_world(Other(), episodes_of(Other), PROTOCOL)


@pytest.mark.parametrize(("times", "replayed"), [(1, 16), (2, 15)])
def test_a_world_that_raises_in_a_replay_is_not_random_for_that(times, replayed, caplog):
    """The replay is tried once more; then the episode is left out."""

    class Raising(Fixed):
        left = 0

        def reset(self, task, seed):
            if Raising.left:
                Raising.left -= 1
                raise RuntimeError("jammed")
            return super().reset(task, seed)

    episodes, Raising.left = episodes_of(Raising), times

    found = check_world(Raising(), episodes, PROTOCOL)
    assert (found.kind, found.episodes, found.came_back) == ("deterministic", replayed, replayed)
    assert ("without 1 of 16 episodes" in caplog.text) == (replayed == 15)
    Raising.left = 999
    with pytest.raises(
        RunError, match=r"none of 16 episodes went .* the environment failed at turn 0 .*jammed"
    ):
        check_world(Raising(), episodes, PROTOCOL)


def test_a_world_that_raises_after_another_answer_is_open():
    """A recorded action is wrong for the other answer; this is no failure of the world."""
    random.seed(0)

    class Door(Coins):
        def step(self, action):
            if self.turn and (action == "toss") != self.is_open:
                raise ValueError("no such door")
            self.turn += 1
            self.is_open = random.random() < 0.15
            return Observation("Open." if self.is_open else "Shut.", 0.0, self.turn == 3)

    class Walker(Player):
        def generate(self, prompts, sampling):
            seen = ["Open" in str(each.observation) for each in prompts]
            return [Action("Action: toss" if is_open else "Action: wait") for is_open in seen]

    jobs = [Job(task, n, n) for n in range(4) for task in Door().tasks("train")]
    episodes = list(play(jobs, Walker(), Door, protocol=PROTOCOL, sampling=Sampling()))

    found = check_world(Door(), episodes, PROTOCOL)
    assert (found.kind, found.episodes) == ("open", 16)
    assert found.came_back < 16


def test_a_world_to_which_few_episodes_return_is_told(caplog):
    random.seed(0)
    check_world(Coins(), episodes_of(Coins), PROTOCOL)
    assert "episodes got their recorded observations again; turns to which" in caplog.text


def test_a_hidden_goal_of_the_seed_is_found_in_other_episodes():
    """A replay under another seed finds it only if the recorded action meets the goal of either seed."""

    class Hidden(Fixed):
        def reset(self, task, seed):
            self.goal = "wait" if seed == 1 else "none"
            return super().reset(task, seed)

        def step(self, action):
            super().step("wait")
            return Observation("Nothing.", float(action == self.goal), self.turn == 3)

    jobs = [Job(Task("t"), seed, seed) for seed in range(3)]
    episodes = play(jobs, Waiting(), Hidden, protocol=PROTOCOL, sampling=Sampling())
    first, lucky, last = sorted(episodes, key=lambda one: one.key)

    assert check_world(Hidden(), [first, last], PROTOCOL).kind == "deterministic"
    assert check_world(Hidden(), [first, last], PROTOCOL, [first, lucky, last]).kind == "seeded"
    crashed = replace(lucky, status=Status.FAILED, error="RuntimeError: gone")
    assert check_world(Hidden(), [first, last], PROTOCOL, [first, crashed, last]).kind == "deterministic"


@pytest.mark.parametrize("differs", ["reward", "end"])
def test_a_world_whose_last_answer_alone_is_random_is_open(differs):
    """No turn comes after the last answer, so no observation shows it; its reward and end are luck all the same."""
    now = random.Random(0)

    class Lottery(Fixed):
        def step(self, action):
            self.turn += 1
            won = self.turn == 3 and now.random() < 0.5
            over = self.turn == 3 and (won or differs == "reward")
            return Observation("Nothing.", float(won and differs == "reward"), over, won)

    found = check_world(Lottery(), episodes_of(Lottery), PROTOCOL)
    assert found.kind == "open"
    assert found.came_back < found.episodes


def test_a_world_of_random_rewards_alone_is_measured():
    now = random.Random(0)

    class Gauss(Fixed):
        def step(self, action):
            self.turn += 1
            last = self.turn == 3
            return Observation("Nothing.", now.gauss(0, 1) if last else 0.0, last, last)

    found = check_world(Gauss(), episodes_of(Gauss), PROTOCOL)
    assert (found.kind, found.came_back) == ("open", 0)


def test_in_an_open_world_the_action_is_answered_anew():
    """A toss wins by halves, whatever it showed when it was recorded: the value after it counts both answers."""
    random.seed(1)
    tossed = next(one for one in episodes_of(Coins) if one.turns[2].action.text == "Action: toss")
    planned = plan([tossed], "open")
    jobs = [each for each in planned.jobs(0, 200, []) if each.point == Point(*tossed.key, 2, True)]

    found = [
        each.ended(one) for each, one in zip(jobs, played(Coins, [each.job for each in jobs]), strict=True)
    ]
    counted = [one for one in found if one.outcome == "counted"]
    shown = any("Heads" in turn.observation_text for turn in tossed.turns)
    rate = sum(one.success for one in counted) / len(counted)
    assert len(counted) > 20
    assert {one.turns for one in counted} == {0}
    assert rate == 1 if shown else 0.25 < rate < 0.75
    assert len(counted) < len(found) or "toss" not in str([turn.action.text for turn in tossed.turns[:2]])


def test_in_a_seeded_world_each_episode_has_its_points():
    episodes = episodes_of(Seeded)

    assert len(plan(episodes, "seeded").points) == 3 * len(episodes)
    assert len(plan(episodes, "deterministic").points) < 3 * len(episodes)


def test_what_is_there_changes_no_number_of_what_is_missing():
    """A conversation's identity has the sample, and paid answers are found again by it."""
    episodes = episodes_of(Fixed, samples=1)
    planned = plan(episodes, "deterministic")
    every = list(planned.jobs(0, 4, []))

    (_, done), *_ = [(each, each) for each in every[:1]]
    found = SimpleNamespace(point=done.point, number=done.number, outcome="counted")
    assert list(planned.jobs(0, 4, [found])) == every[1:]


def test_a_failed_continuation_is_replaced_by_its_next_result(tmp_path):
    file, failed = (
        tmp_path / "continuations.jsonl",
        Continuation("t", 0, 1, False, 2, 0.0, False, 0, "failed"),
    )
    counted = replace(failed, reward=1.0, outcome="counted")
    with ContinuationFile(file) as store:
        store.append(failed)
        store.append(counted)

        assert store.found == [counted]
    assert read_continuations(file) == [counted]


def test_points_of_a_long_episode_read_each_turn_once():
    """Only where episodes share points."""

    class Read(dict):
        times = 0

        def __repr__(self):
            Read.times += 1
            return super().__repr__()

    turns = tuple(Turn((Read(role="user", content=str(n)),), Action("go")) for n in range(30))
    one = Trajectory(Task("t"), turns)
    planned = plan([one, replace(one, sample=1)], "deterministic")

    assert Read.times == 60
    assert planned.before[0] == planned.before[1]
    plan([one], "open")
    assert Read.times == 60


def test_more_continuations_change_no_number_of_the_earlier_ones():
    """A killed call that is resumed with more of them finds its paid answers."""
    planned = plan(episodes_of(Fixed, samples=2), "deterministic")
    few, many = (
        {(each.point, each.number): each.job for each in planned.jobs(0, continuations, [])}
        for continuations in (4, 9)
    )

    assert few == {key: many[key] for key in few}
    keys = [(job.task.id, job.sample) for job in many.values()]
    assert len(set(keys)) == len(keys)


def test_continuations_resume_after_a_kill(tmp_path):
    """A torn last line is played again, and a larger number keeps what is there."""
    episodes = episodes_of(Fixed, samples=1)
    planned, file = plan(episodes, "deterministic"), tmp_path / "continuations.jsonl"

    def go_on(continuations):
        with ContinuationFile(file) as store:
            missing = {each.job.sample: each for each in planned.jobs(0, continuations, store.found)}
            by_key = {
                (each.job.task.id, each.job.sample): each
                for each in planned.jobs(0, continuations, store.found)
            }
            for one in played(Fixed, [each.job for each in by_key.values()]):
                store.append(by_key[one.key].ended(one))
            return len(by_key), missing

    go_on(4)
    whole = {(one.point, one.number): one for one in read_continuations(file)}
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    kept = len(read_continuations(file))
    assert 0 < kept < len(whole) == 4 * len(planned.points)
    assert go_on(4)[0] == len(whole) - kept
    assert {(one.point, one.number): one for one in read_continuations(file)} == whole
    assert go_on(6)[0] == 2 * len(planned.points)
    assert len(measure(planned, returns_of(read_continuations(file))).task) == sum(
        len(one.turns) for one in episodes
    )


def test_more_episodes_keep_the_chosen_ones():
    episodes = episodes_of(Fixed)

    few, many = choose(episodes, 3, seed=0), choose(episodes, 7, seed=0)
    assert many[:3] == few
    assert len({one.task.id for one in many[:4]}) == 4
    assert choose(episodes[::-1], 7, seed=0) == many


def test_a_forecast_says_what_an_interval_needs():
    """Before a continuation is played, from the returns of whole episodes."""
    episodes = episodes_of(Fixed)
    world = WorldCheck("deterministic", episodes=6, came_back=6, under_another_seed=6)
    planned = plan(episodes, world.kind)

    found = forecast(world, planned, episodes, [], continuations=8, wanted=0.1)
    assert found.world == world
    assert found.to_play == 8 * found.points
    assert not found.from_pilot
    assert found.needed > 8
    assert found.width > 0.1


def test_a_forecast_has_the_width_of_the_measured_intervals():
    """Of points with rates of 0 to 1, where eight continuations are forecast from four.

    Last turns have a narrower interval, since the value after them is known.
    """
    episodes = [replace(one, sample=n) for n, one in enumerate(episodes_of(Fixed) * 10)]
    planned, random = plan(episodes, "seeded"), np.random.default_rng(0)
    few, many = {}, {}
    for point in planned.points:
        drawn = random.binomial(1, random.random(), 8) * 1.0
        few[point], many[point] = drawn[:4], drawn

    for continuations, returns in ((4, few), (8, many)):
        turns = measure(planned, returns)
        turns = turns.where(turns.position < turns.length - 1)
        width = float((turns.high - turns.low).mean() / 2)
        assert expected_width(list(few.values()), continuations) == pytest.approx(width, rel=0.08)


def test_equal_returns_have_no_forecast():
    """No episode succeeded: the next ones may all the same."""
    episodes = [
        replace(one, turns=tuple(replace(turn, reward=0.0) for turn in one.turns), total_reward=0.0)
        for one in episodes_of(Fixed)
    ]
    world = WorldCheck("deterministic", episodes=6, came_back=6, under_another_seed=6)

    found = forecast(world, plan(episodes, world.kind), episodes, [], continuations=8, wanted=0.1)
    assert (found.width, found.needed) == (None, None)


def test_a_full_context_after_the_repeated_action_is_a_counted_continuation():
    """Its return is the reward of the repeated action."""

    class Paying(Fixed):
        def step(self, action):
            return Observation("Nothing.", 0.5)

    class Full(Player):
        def generate(self, prompts, sampling):
            return [ContextFull("full")] * len(prompts)

    (one,) = played(Paying, [Job(Task("t"), 0, 0)])
    planned = next(each for each in plan([one], "open").jobs(0, 1, []) if each.point.acted)
    (found,) = play([planned.job], Full(), Paying, protocol=PROTOCOL, sampling=Sampling())

    assert planned.ended(found) == Continuation(*planned.point, 0, 0.5, False, 0)
