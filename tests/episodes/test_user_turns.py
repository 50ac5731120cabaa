"""A user whom a model, a script or a record plays: episodes in which the environment hands over the user's turn."""

import threading
import time
from dataclasses import replace

import pytest

from perturn.config.sections import Worlds
from perturn.data.records import line_of, parse_line
from perturn.engines.with_user import with_user
from perturn.envs.environment_check import check_environment
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.episode import Job, episode
from perturn.episodes.lockstep_blocks import play_blocks
from perturn.episodes.play_many import play
from perturn.episodes.replay import play_script, replay
from perturn.errors import ConfigError, ContextFull, EngineFailure, RunError
from perturn.faults import observation_faults
from perturn.types import (
    Action,
    EpisodeProtocol,
    Observation,
    Sampling,
    SimulatedUser,
    Status,
    Trajectory,
    UserTurn,
    unfinished,
)
from support.examiner import Examiner
from support.shop import Shop

SCRIPTED = EpisodeProtocol("shop", format="plain", system="Sell one fruit.", max_turns=4)
PLAYED = replace(SCRIPTED, user=SimulatedUser("customer"))


def jobs(samples=1, split="train"):
    return [Job(task, seed, seed) for task in Shop().tasks(split) for seed in range(samples)]


def by_hand(job, *says, protocol=PLAYED, env=None):
    """Play with one text for each prompt; the trajectory, and the prompts."""
    steps, said, prompts = episode(env or Shop(), job, protocol=protocol), iter(says), []
    try:
        prompts.append(next(steps))
        while True:
            prompts.append(steps.send(Action(next(said))))
    except StopIteration as end:
        return end.value, prompts


ASKED = ("An apple or a pear?", "Which?", "Mmh, a pear.", "sell pear")
"""The user opens, the policy asks, the user answers, the policy sells the wrong fruit."""


def test_the_user_is_asked_beside_the_policy():
    """Prompts of the user, the policy, the user, the policy; the user's has its instructions and its side."""
    one, prompts = by_hand(jobs()[0], *ASKED)

    assert [each.of_user for each in prompts] == [True, False, True, False]
    assert len({each.seed for each in prompts}) == 4
    assert prompts[0].messages == ({"role": "system", "content": "You want one apple."},)
    assert [each["role"] for each in (*prompts[2].messages, *prompts[2].observation)] == [
        *("system", "user", "assistant", "user"),
    ]
    assert [turn.user_said for turn in one.turns] == [(ASKED[0],), (ASKED[2],)]
    assert [turn.observation_text for turn in one.turns] == [ASKED[0], ASKED[2]]
    assert (one.status, one.total_reward, one.terminated) == (Status.COMPLETED, 0.0, True)


def test_the_prompt_of_the_recipe_takes_the_instructions_in():
    protocol = replace(SCRIPTED, user=SimulatedUser("customer", "Be rude. {instructions} {nothing}"))
    _, prompts = by_hand(jobs()[0], *ASKED, protocol=protocol)

    assert prompts[0].messages[0]["content"] == "Be rude. You want one apple. {nothing}"


def test_what_the_user_said_is_stored():
    one, _ = by_hand(jobs()[0], *ASKED)

    assert parse_line(Trajectory, line_of(one), "here") == one
    plain = replace(one, turns=(replace(one.turns[0], user_said=()),))
    assert b"user_said" not in line_of(plain)


def test_a_users_last_words_are_stored_too():
    """`Bye.` ends the episode after the policy's last action."""
    one, _ = by_hand(jobs()[0], "Hi.", "never", "Bye.")

    assert (one.terminated, one.user_said, len(one.turns)) == (True, ("Bye.",), 1)
    assert parse_line(Trajectory, line_of(one), "here") == one


@pytest.mark.parametrize("thought", ["<think>\nI say Bye.\n</think>\n\n", "I say Bye.\n</think>\n\n"])
def test_a_thought_of_the_users_model_is_not_said(thought):
    """Neither to the environment, which `Bye.` would end, nor to the policy, nor in the record."""
    one, prompts = by_hand(jobs()[0], thought + "Hi.", "What?", thought + "A pear.", "sell pear")

    assert [turn.observation_text for turn in one.turns] == ["Hi.", "A pear."]
    assert [turn.user_said for turn in one.turns] == [("Hi.",), ("A pear.",)]
    assert thought not in str(prompts)


@pytest.mark.parametrize("said", ["", " \n", "<think>\nI say", "<think>\nI say Hi.\n</think>"])
def test_an_answer_of_the_users_model_without_text_fails_the_episode(said):
    one, _ = by_hand(jobs()[0], said)

    assert one.status is Status.FAILED
    assert one.error == (
        "EnvironmentFailure: the user's model gave no text; raise user.sampling.max_new_tokens."
    )


def test_without_a_model_the_script_speaks():
    one, prompts = by_hand(jobs()[0], "What?", "sell apple", protocol=SCRIPTED)

    assert not any(each.of_user for each in prompts)
    assert [turn.user_said for turn in one.turns] == [("I would like one apple.",), ("Please.",)]
    assert one.success


def test_a_user_whom_nobody_plays_fails_the_episode():
    world = Shop()
    world.script = False
    one, _ = by_hand(jobs()[0], protocol=SCRIPTED, env=world)

    assert one.status is Status.FAILED
    assert "nobody plays the user; set user" in one.error


def test_a_world_that_never_stops_handing_over_fails_its_episode():
    world = Shop()
    world.step = lambda action: world._hand_over("Again.")
    one, _ = by_hand(jobs()[0], protocol=SCRIPTED, env=world)

    assert one.status is Status.FAILED
    assert "more than 8 times in a row" in one.error


def test_a_branch_hears_what_was_said_before_it():
    """The user is not asked again up to the turn at which the episode is resumed, and is asked after it."""
    one, _ = by_hand(jobs()[0], "A fruit.", "Which?", "Guess.", "Hm.", "The red one.", "sell pear")

    again, prompts = by_hand(
        replace(jobs()[0], sample=5, begun=one, kept=1), "Well?", "An apple!", "sell apple"
    )

    assert [each.of_user for each in prompts] == [False, True, False]
    assert [turn.user_said for turn in again.turns] == [("A fruit.",), ("Guess.",), ("An apple!",)]
    assert (again.status, again.success) == (Status.COMPLETED, True)


def test_an_unfinished_episode_goes_on_without_asking_twice():
    """The user's answer to the window's last action is in the record, and opens the next window."""
    begun, _ = by_hand(replace(jobs()[0], window=1), "A fruit.", "Which?", "Guess.")
    assert unfinished(begun)

    one, prompts = by_hand(replace(jobs()[0], begun=begun), "sell apple")

    assert [each.of_user for each in prompts] == [False]
    assert [turn.user_said for turn in one.turns] == [("A fruit.",), ("Guess.",)]
    assert one.success


def test_a_recorded_episode_is_replayed_with_its_user():
    one, _ = by_hand(jobs()[0], *ASKED)

    assert replay(Shop(), one, SCRIPTED) == ["Which?", "sell pear"]


def test_an_expert_plays_with_the_script():
    steps = episode(Shop(), jobs()[0], protocol=SCRIPTED, policy="expert")

    assert play_script(steps, [Action("sell apple")], EngineFailure("over")).success


def customer(text, seed):
    """Wants what the instructions say, in the last word."""
    return "One fruit."


class Streaming(Examiner):
    """An engine that takes prompts on, and answers one of them at a time."""

    def __init__(self, say):
        super().__init__(say)
        self.waiting = []

    def submit(self, prompts, sampling):
        """Take prompts on."""
        self.waiting += prompts

    def advance(self):
        """Answer the first one."""
        first, self.waiting = self.waiting[:1], self.waiting[1:]
        return list(zip(first, self.generate(first, None), strict=True))


@pytest.mark.parametrize("kind", [Examiner, Streaming])
def test_policy_and_user_have_engines_of_their_own(kind):
    """Eight episodes at a time; both forget what is over, and the user's sampling is its own."""
    samplings = []

    class Customer(Examiner):
        def generate(self, prompts, sampling):
            samplings.append(sampling)
            self.is_busy = True
            time.sleep(0.005)
            self.is_busy = False
            return super().generate(prompts, sampling)

        def forget(self, conversation):
            assert not self.is_busy  # engines are no two threads'
            super().forget(conversation)

    policy, user = kind(lambda text, seed: "sell apple"), Customer(customer)
    served = with_user(policy, user, Sampling(max_new_tokens=7))

    found = list(play(jobs(4), served, Shop, protocol=PLAYED, sampling=Sampling(), concurrency=8))

    assert [one.total_reward for one in sorted(found, key=lambda one: one.key)] == [1.0] * 4 + [0.0] * 4
    assert (len(policy.asked), len(user.asked)) == (8, 8)
    assert {each.max_new_tokens for each in samplings} == {7}
    assert not policy.open | user.open
    assert served.name == policy.name
    served.close()


def test_policy_and_user_work_at_the_same_time():
    """Each waits for the other to have begun, so one after the other would wait for ever."""
    barrier = threading.Barrier(2, timeout=20)

    def meet(said):
        return lambda text, seed: (barrier.wait(), said)[1]

    served = with_user(Examiner(meet("a")), Examiner(meet("b")), Sampling())
    _, (first, second) = by_hand(jobs()[0], "A fruit.", "sell apple")

    assert [each.text for each in served.generate([first, second], Sampling())] == ["b", "a"]
    served.close()


def test_blocks_in_lock_step_have_their_users():
    served = with_user(Examiner(lambda text, seed: "sell pear"), Examiner(customer), Sampling())

    found = list(play_blocks([jobs(2)], served, Shop, protocol=PLAYED, sampling=Sampling()))

    assert [one.total_reward for one in found] == [0.0, 0.0, 1.0, 1.0]
    served.close()


@pytest.mark.parametrize("kind", [Examiner, Streaming])
def test_a_user_without_an_answer_fails_its_episode_alone(kind):
    """Even where the user's context is full, which is no limit of the policy's."""

    def say(text, seed):
        return ContextFull("full") if seed >= 1_000_003 else "One."

    served = with_user(kind(lambda text, seed: "sell apple"), Examiner(say), Sampling())

    found = list(play(jobs(2), served, Shop, protocol=PLAYED, sampling=Sampling()))

    assert [one.status for one in sorted(found, key=lambda one: one.key)] == [
        Status.COMPLETED,
        Status.FAILED,
    ] * 2
    assert all("the user's model: full" in one.error for one in found if one.error)
    served.close()


@pytest.mark.parametrize("kind", [Examiner, Streaming])
def test_a_user_that_nobody_can_ask_ends_the_run(kind):
    def refuse(text, seed):
        raise ConfigError("no key.")

    served = with_user(kind(lambda text, seed: "sell apple"), Examiner(refuse), Sampling())

    with pytest.raises(RunError, match=r"the user cannot be asked: no key\. \(user\.model"):
        list(play(jobs(), served, Shop, protocol=PLAYED, sampling=Sampling()))
    served.close()


def test_a_world_in_a_process_hands_the_users_turn_over():
    """The turn crosses as plain data."""
    make = ProcessWorlds({"name": "support.shop:Shop"}, Worlds())
    served = with_user(Examiner(lambda text, seed: "sell apple"), Examiner(customer), Sampling())

    found = list(play(jobs(), served, make, protocol=PLAYED, sampling=Sampling()))

    assert sorted(one.total_reward for one in found) == [0.0, 1.0]
    assert {turn.user_said for one in found for turn in one.turns} == {("One fruit.",)}
    served.close()


def test_it_keeps_the_contract_of_environments():
    """`check-env` has the script speak, or says yes."""
    silent = type("Silent", (Shop,), {"script": False})

    assert check_environment(Shop) == []
    assert check_environment(silent) == []


@pytest.mark.parametrize(
    "user", ["me", UserTurn("x", ()), UserTurn("x", ({"role": "user"},)), UserTurn("\ud800", ({},))]
)
def test_a_turn_that_no_model_could_read_is_a_fault(user):
    (found,) = observation_faults(Observation("", user=user))

    assert "UserTurn(instructions, heard, scripted)" in found
