"""Values of actions: a head that has learned from other episodes, at the last token of an action."""

from dataclasses import replace
from math import inf

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.tokens import Renderer
from perturn.errors import RunError
from perturn.policy.action_scorers import ActionValues
from perturn.policy.value_heads import PENALTIES, action_features, fit_values
from perturn.quantities.readers import Reader
from perturn.types import Action, Prompt, Status, Task, Trajectory, Turn
from support.models import make_tiny_model

ASKED = ({"role": "user", "content": "more?"},)


def written(renderer, text):
    """An action as an engine gives it, but for what it was sampled with."""
    ids = renderer.tokenizer(text, add_special_tokens=False).input_ids
    return renderer.action([*ids, renderer.end_id], ())


@pytest.fixture(scope="module")
def renderer(whole_tokenizer):
    """Conversation -> tokens of the whole vocabulary, in which most words have tokens of their own."""
    return Renderer(whole_tokenizer)


@pytest.fixture
def tiny_model():
    """A fresh tiny policy that knows them."""
    return make_tiny_model(vocabulary=49152)


@pytest.fixture
def episode(renderer):
    """Makes an episode of these texts that ends with a reward."""

    def make(reward, *texts, **changes):
        turns = tuple(Turn(ASKED, written(renderer, text)) for text in texts)
        turns = (*turns[:-1], replace(turns[-1], reward=reward))
        return Trajectory(Task("t"), turns, total_reward=reward, **changes)

    return make


@pytest.fixture
def lessons(episode):
    """Episodes whose last word says how they end, and whose first one does not."""
    words = ["one", "two of them", "4", "yes", "no", "a box"]
    return [
        episode(reward, word, last)
        for word in words
        for reward, last in ((0.0, "the door is shut"), (1.0, "take lamp"))
    ]


def test_a_head_is_ridge_regression_on_standardized_features():
    """Against the normal equations in their plain form, over all rows, with the penalty that was chosen.

    (X'X / n + penalty d I) v = X'y / n   with X standardized and y less its mean; w = v / deviation
    """
    draw = torch.Generator().manual_seed(0)
    features = [torch.randn(1 + k % 3, 4, generator=draw) for k in range(15)]
    truth = torch.tensor([1.0, -2.0, 0.0, 0.5])
    targets = [(own @ truth + 0.3 * torch.randn(len(own), generator=draw)).double() for own in features]
    rows, wanted = torch.cat(features).double(), torch.cat(targets)
    asked = torch.randn(5, 4, generator=draw)

    found = fit_values(features, targets)(asked)

    by_penalty = {}
    for penalty in PENALTIES:
        deviation = rows.std(0, correction=0)
        scaled = (rows - rows.mean(0)) / deviation
        left = scaled.T @ scaled / len(rows) + 4 * penalty * torch.eye(4, dtype=torch.float64)
        weight = torch.linalg.solve(left, scaled.T @ (wanted - wanted.mean()) / len(rows)) / deviation
        by_penalty[penalty] = (asked - rows.mean(0)) @ weight + wanted.mean()
    assert min(float((found - one).abs().max()) for one in by_penalty.values()) < 1e-9
    assert (found - asked.double() @ truth.double()).abs().max() < 0.5


def test_a_head_that_knows_the_outcome_picks_the_right_action_and_episode(
    tiny_model, renderer, lessons, episode
):
    """Learned from twelve episodes; 1 and 0 are what it was told, of these and of a beginning that is new."""
    values = ActionValues(Reader(tiny_model, renderer, 4096), lessons)
    actions = [written(renderer, text) for text in ("the door is shut", "take lamp", "the door is shut")]

    of_actions = values(Prompt((), lessons[0].turns[:1], ASKED, 0, "t#0"), actions)
    of_episodes = values.of_episodes(
        [episode(0.0, "up", "take lamp"), episode(1.0, "up", "the door is shut")]
    )

    assert of_actions[1] > 0.7 > 0.3 > max(of_actions[0], of_actions[2])
    assert of_actions[0] == of_actions[2]
    assert of_episodes[0] > 0.7 > 0.3 > of_episodes[1]
    assert 0.1 < values.explained < 1
    assert values.episodes == 12
    assert values.tokens == sum(len(renderer.encode(one).ids) for one in lessons)


@pytest.mark.parametrize("earlier", [0, 2])
def test_q_of_an_action_is_that_of_the_episode_that_ends_with_it(
    tiny_model, renderer, lessons, episode, earlier
):
    """The prompt once for all actions, and each episode whole: 1e-5 for float32."""
    values = ActionValues(Reader(tiny_model, renderer, 4096), lessons)
    before = ("no", "yes")[:earlier]
    texts = ["one", "two of them", "won"]
    played = [episode(0.0, *before, text) for text in texts]

    found = values(
        Prompt((), played[0].turns[:-1], ASKED, 0, "t#0"), [one.turns[-1].action for one in played]
    )

    assert found == pytest.approx(values.of_episodes(played), abs=1e-5)
    assert len({round(each, 3) for each in found}) == 3


def test_every_turn_of_an_episode_teaches_its_score(tiny_model, renderer, episode):
    """The rows are those of all turns, with the total reward: the same head as from these rows."""
    lessons = [episode(float(k), *["one", "4", "yes", "no"][: 1 + k]) for k in range(4)]
    features = action_features(tiny_model, [renderer.encode(one) for one in lessons])
    targets = [torch.full((1 + k,), float(k), dtype=torch.float64) for k in range(4)]
    expected = [float(fit_values(features, targets)(own[-1:])) for own in features]

    assert_close(
        torch.tensor(ActionValues(Reader(tiny_model, renderer, 4096), lessons).of_episodes(lessons)),
        torch.tensor(expected),
        atol=1e-5,
        rtol=0,
    )


def test_what_cannot_be_read_is_the_lowest_and_what_failed_teaches_nothing(
    tiny_model, renderer, lessons, episode
):
    lost = [episode(9.0, "won", status=Status.FAILED, error="lost"), Trajectory(Task("t"), ())]
    values = ActionValues(Reader(tiny_model, renderer, 4096), [*lost, *lessons])

    found = values(Prompt((), (), ASKED, 0, "t#0"), [Action("won"), written(renderer, "lost")])

    assert (values.episodes, found[0]) == (12, -inf)
    assert found[1] > -inf
    assert values.of_episodes([lost[1], lessons[0]])[0] == -inf
    with pytest.raises(
        RunError, match="learns from all FAILED, are not over or have no turns; choose by something else"
    ):
        ActionValues(Reader(tiny_model, renderer, 4096), lost)


def test_equal_scores_teach_no_difference(tiny_model, renderer, episode):
    """All actions are alike, and nothing is explained."""
    values = ActionValues(
        Reader(tiny_model, renderer, 4096), [episode(1.0, text) for text in ("one", "4", "yes")]
    )

    assert values.of_episodes([episode(0.0, "no"), episode(0.0, "won")]) == pytest.approx([1.0, 1.0])
    assert values.explained is None


def test_what_tells_tasks_apart_says_nothing_of_other_tasks(tiny_model, renderer, episode):
    """Scores are those of the task, of which each action names one: other samples tell them, other tasks do not.

    Heads that learn from other samples of a task explain 1.00 of what they know nothing about, from other tasks -0.11.
    """
    words = ["one", "two of them", "4", "yes", "no", "a box", "key", "west", "door", "up", "lamp", "fire"]
    lessons = [
        replace(episode(float(k % 3 == 0), word), task=Task(word), sample=sample)
        for k, word in enumerate(words)
        for sample in range(6)
    ]

    values = ActionValues(Reader(tiny_model, renderer, 4096), lessons)
    again = ActionValues(
        Reader(tiny_model, renderer, 4096), [replace(one, task=Task("t")) for one in lessons]
    )

    assert again.explained > 0.9
    assert values.explained < 0.3
