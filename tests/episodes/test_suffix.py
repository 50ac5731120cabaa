"""A text after the one that poses the task: as it is played, and as an episode is told afterwards."""

from dataclasses import replace

import pytest

from perturn.episodes.episode import Job, episode
from perturn.episodes.prompts import suffixed, with_suffix
from perturn.types import Action, EpisodeProtocol, Observation, Task


class Rooms:
    """A world that says which commands it understands; the third one ends it."""

    name = "rooms-1"

    def reset(self, task, seed):
        """Pose the task."""
        self.steps = 0
        return Observation("Your task is: leave.", admissible=("north", "south"))

    def step(self, action):
        """Go on."""
        self.steps += 1
        return Observation(f"Room {self.steps}.", terminated=self.steps == 3, admissible=("east",))

    def close(self):
        """Hold nothing."""
        pass


def play(protocol):
    """An episode of three fixed actions."""
    steps = episode(Rooms(), Job(Task("a"), 0), protocol=protocol)
    prompts = [next(steps)]
    try:
        for text in ("north", "ehm", "east", "up"):
            prompts.append(steps.send(Action(text)))
    except StopIteration as end:
        return prompts, end.value
    return prompts, None


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("history", [None, 1])
def test_an_episode_told_afterwards_is_the_one_that_is_played_under_the_suffix(listed, history):
    """Word by word, what later turns recall of the task too; the list of commands comes last."""
    plain = EpisodeProtocol("rooms", format="action", history=history, list_admissible=listed, max_turns=4)
    asked = replace(plain, suffix="Leave well.")

    prompts, played = play(asked)
    _, before = play(plain)

    assert suffixed(before, "Leave well.").turns == played.turns
    assert played.turns[0].observation_text.startswith("Your task is: leave.\nLeave well.")
    assert played.turns[0].observation_text.endswith("south" if listed else "well.")
    shown = [
        str(message["content"]) for message in (*prompts[-1].turns[0].observation, *prompts[-1].observation)
    ]
    assert sum("Leave well." in text for text in shown) == 1


def test_no_suffix_changes_nothing():
    assert with_suffix("Leave.", "") == "Leave."
