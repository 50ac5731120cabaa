"""What a policy is shown under a protocol: example, listed commands, shortened history."""

from dataclasses import dataclass

import pytest
import torch

from perturn.chat.tokens import Renderer
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.play_many import Job, episode, play
from perturn.episodes.prompts import system_prompt
from perturn.types import Action, EpisodeProtocol, Observation, Sampling, Task

EXAMPLE = (
    {"role": "user", "content": "You see a lamp."},
    {"role": "assistant", "content": "Action: use lamp"},
)


@dataclass
class Corridor:
    """Doors 0, 1, 2, ... one after the other; understands 'north'."""

    name = "corridor-1.0"

    def tasks(self, split):
        """One."""
        return [Task("t")]

    def reset(self, task, seed):
        """Stand at door 0."""
        self.door = 0
        return Observation("Find the exit. Door 0.", admissible=("north", "wait"))

    def step(self, action):
        """Go on, or not."""
        if action != "north":
            return Observation("What?", valid=False, admissible=("north", "wait"))
        self.door += 1
        return Observation(f"Door {self.door}.", admissible=("north", "wait"))

    def close(self):
        """Nothing is held."""


def protocol(**rules):
    return EpisodeProtocol("p", **{"format": "action", "max_turns": 5} | rules)


def walk(rules, text="Action: north"):
    """(all prompts, trajectory) of an episode that goes north until its end."""
    steps = episode(Corridor(), Job(Task("t"), seed=0), protocol=rules)
    prompts = [next(steps)]
    try:
        while True:
            prompts.append(steps.send(Action(text)))
    except StopIteration as end:
        return prompts, end.value


def texts(prompt):
    """The observations of a prompt, the newest last."""
    return [turn.observation[0]["content"] for turn in prompt.turns] + [prompt.observation[0]["content"]]


def test_an_example_stands_between_system_text_and_first_observation():
    """It is in the prompt of each turn and of the trajectory, so it carries no loss."""
    rules = protocol(system="Play.", example=EXAMPLE)

    prompts, trajectory = walk(rules)

    assert trajectory.prompt == (system_prompt(protocol(system="Play."))[0], *EXAMPLE)
    assert all(prompt.messages == trajectory.prompt for prompt in prompts)
    assert trajectory.messages[3]["content"] == "Find the exit. Door 0."


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (({"role": "user", "content": "a"},), "end with an assistant message"),
        (EXAMPLE[1:], "begin with a user message"),
        (({"role": "system", "content": "a"}, *EXAMPLE), r"example\[0\] must be a message of user"),
        (({"role": "user"}, *EXAMPLE[1:]), r"example\[0\] must be a message of user"),
    ],
)
def test_an_example_that_no_observation_can_follow_is_refused(example, says):
    with pytest.raises(ValueError, match=says):
        protocol(example=example)


def test_commands_are_listed_where_the_protocol_says_so():
    """Also in what a turn that broke the format is told, since the state is the same."""
    listed, trajectory = walk(protocol(list_admissible=True, max_turns=2), text="go north")
    plain, _ = walk(protocol(max_turns=2))

    assert texts(listed[0]) == ["Find the exit. Door 0.\nAdmissible commands:\nnorth\nwait"]
    assert trajectory.turns[1].observation_text.startswith("That was not understood.")
    assert trajectory.turns[1].observation_text.endswith("\nAdmissible commands:\nnorth\nwait")
    assert texts(plain[1]) == ["Find the exit. Door 0.", "Door 1."]


@pytest.mark.parametrize(
    ("history", "third", "fifth"),
    [
        (None, ["Find the exit. Door 0.", "Door 1.", "Door 2."], None),
        (9, ["Find the exit. Door 0.", "Door 1.", "Door 2."], None),
        (
            2,
            ["Find the exit. Door 0.", "Door 1.", "Door 2."],
            ["Find the exit. Door 0.\n\n(2 turns are left out here.)\n\nDoor 2.", "Door 3.", "Door 4."],
        ),
        (
            1,
            ["Find the exit. Door 0.\n\n(1 turn is left out here.)\n\nDoor 1.", "Door 2."],
            ["Find the exit. Door 0.\n\n(3 turns are left out here.)\n\nDoor 3.", "Door 4."],
        ),
        (
            0,
            ["Find the exit. Door 0.\n\n(2 turns are left out here.)\n\nDoor 2."],
            ["Find the exit. Door 0.\n\n(4 turns are left out here.)\n\nDoor 4."],
        ),
    ],
)
def test_a_shortened_history_shows_the_last_turns_and_the_task(history, third, fifth):
    """What posed the task opens the oldest message that is kept, so roles still take turns."""
    prompts, trajectory = walk(protocol(history=history))

    assert texts(prompts[2]) == third
    assert fifth is None or texts(prompts[4]) == fifth
    assert trajectory.history == history
    assert [turn.observation_text for turn in trajectory.turns][1:] == [f"Door {n}." for n in range(1, 5)]


def test_earlier_observations_of_a_shortened_history_have_no_list():
    """Commands of earlier states are no use; a full history stays as it was, so that its tokens are a prefix."""
    short, _ = walk(protocol(history=1, list_admissible=True))
    full, _ = walk(protocol(list_admissible=True))

    assert [text.count("Admissible") for text in texts(short[3])] == [0, 1]
    assert [text.count("Admissible") for text in texts(full[3])] == [1, 1, 1, 1]


def test_a_kept_cache_does_not_leak_what_is_left_out(tiny_model, tokenizer):
    """One engine for the whole episode answers each prompt as a fresh engine does: greedy, so exactly."""
    rules, sampling = protocol(history=1), Sampling(max_new_tokens=5)
    tokens = Renderer(tokenizer)
    asked = []

    class Watched(LocalEngine):
        def advance(self):
            answered = super().advance()
            asked.extend(answered)
            return answered

    engine = Watched(tiny_model, tokens)
    (trajectory,) = play([Job(Task("t"), 0)], engine, Corridor, protocol=rules, sampling=sampling)

    assert len(asked) == len(trajectory.turns) == 5
    for prompt, answer in asked:
        (fresh,) = LocalEngine(tiny_model, tokens).generate([prompt], sampling)
        assert fresh.token_ids == answer.token_ids
        torch.testing.assert_close(torch.tensor(fresh.logprobs), torch.tensor(answer.logprobs))
