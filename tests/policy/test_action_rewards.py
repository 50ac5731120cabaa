"""Implicit rewards of single actions, in their context."""

from dataclasses import replace
from math import inf

import pytest

from perturn.policy.action_scorers import ImplicitReward, episode_logprobs
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.types import Action, Prompt, Task, Trajectory, Turn
from support.models import make_tiny_model

ASKED = ({"role": "user", "content": "more?"},)
TEXTS = ["one", "two of them", "one", "4"]


def written(renderer, text):
    """An action as an engine gives it, but for what it was sampled with."""
    return renderer.action(
        [*renderer.tokenizer(text, add_special_tokens=False).input_ids, renderer.end_id], ()
    )


@pytest.mark.parametrize("earlier", [0, 2])
def test_it_is_that_of_the_last_turn_of_an_episode(renderer, tiny_folder, tokenizer, earlier):
    """Sums over the tokens of the action, of the policy over its start, by passes over whole episodes.

    1e-4 nats: float32, once for all actions after their prompt and once for each episode.
    """
    before = tuple(Turn(ASKED, written(renderer, text)) for text in ("no", "yes"))[:earlier]
    played = [Trajectory(Task("t"), (*before, Turn(ASKED, written(renderer, text)))) for text in TEXTS]
    ours, theirs = (
        [one[-1].double() for one in reference_of(played, open_reader(model, tokenizer))]
        for model in (make_tiny_model(3), make_tiny_model())
    )
    gains = [float((own - its).sum()) for own, its in zip(ours, theirs, strict=True)]
    actions = [
        replace(one.turns[-1].action, logprobs=tuple(own.tolist()))
        for one, own in zip(played, ours, strict=True)
    ]
    start = open_reader(str(tiny_folder))

    found = ImplicitReward(start)(Prompt((), before, ASKED, 0, "t#0"), actions)

    assert found == pytest.approx(gains, abs=1e-4)
    assert found[0] == found[2]
    assert len({round(gain, 2) for gain in gains}) == 3


def test_that_of_an_action_of_which_nothing_is_known_is_the_lowest(renderer, tiny_folder):
    known = replace(written(renderer, "one"), logprobs=(-1.0,))

    start = open_reader(str(tiny_folder))

    found = ImplicitReward(start)(Prompt((), (), ASKED, 0, "t#0"), [Action("one"), known])

    assert found[0] == -inf
    assert found[1] > -inf


def test_the_logprob_of_an_episode_is_the_sum_over_all_turns(renderer, tiny_folder):
    """As its turns have it one by one; an episode without turns has 0."""
    turns = [Turn(ASKED, written(renderer, text)) for text in TEXTS]
    played = [Trajectory(Task("t"), tuple(turns[:number])) for number in (2, 0, 4)]
    policy = open_reader(str(tiny_folder))

    found = episode_logprobs(policy, played)

    by_turn = reference_of(played, policy)
    assert found == pytest.approx([sum(float(turn.double().sum()) for turn in each) for each in by_turn])
    assert found[1] == 0.0
