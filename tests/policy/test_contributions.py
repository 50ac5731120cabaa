"""Contributions of turns: hidden states that have seen the action, a head on sums that learns from other episodes."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN
from perturn.credit import CREDITS
from perturn.credit.protocol import CreditTraits
from perturn.credit.spa import Shares
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES
from perturn.needs import Needs
from perturn.policy.value_heads import PENALTIES, _fit, action_features, cross_fit_sums
from perturn.quantities.contributions import turn_contributions
from support.valued import EPISODES, drawn, episode


def own_of(tables):
    """Contributions of each episode by its own head."""
    return [each[index % len(each)] for index, each in enumerate(tables)]


@pytest.mark.parametrize("budget", [1, 100_000])
def test_features_are_the_last_hidden_states_of_a_plain_forward(renderer, tiny_model, budget):
    """At the last token of each turn, in the sequence that ends with it, whatever else is in the pack."""
    expected = []
    for one in EPISODES:
        encoded, states = renderer.encode(one), []
        for span in encoded.sequences:
            with torch.no_grad():
                ids = torch.tensor([encoded.ids[span]])
                own = tiny_model(ids, output_hidden_states=True).hidden_states[-1][0]
            turns = [*encoded.turn[span], NO_TURN]
            lasts = [i for i in range(len(own)) if turns[i] != NO_TURN and turns[i + 1] != turns[i]]
            states += [own[i] for i in lasts]
        expected.append(torch.stack(states))
    assert [len(each) for each in expected] == [3, 1, 4, 2, 3]

    found = action_features(tiny_model, [renderer.encode(one) for one in EPISODES], budget)

    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert ours.dtype == torch.float32
        assert not ours.requires_grad


def test_features_have_seen_the_action_and_nothing_after_it(renderer, tiny_model):
    """Another action changes its own; another next reply does not, nor that there is one."""
    one, other = episode("north", "wait"), episode("north", "open the door")
    first, second, alone = (
        action_features(tiny_model, [renderer.encode(each)])[0] for each in (one, other, episode("north"))
    )

    assert_close(first[0], second[0], atol=1e-6, rtol=0)
    assert_close(first[:1], alone, atol=1e-6, rtol=0)
    assert not torch.allclose(first[1], second[1], atol=1e-3)


def test_actions_that_follow_each_other_are_told_apart(renderer, tiny_model):
    """With nothing said between them."""
    one = episode("north", "wait")
    joined = replace(one, turns=(one.turns[0], replace(one.turns[1], observation=())))

    (found,) = action_features(tiny_model, [renderer.encode(joined)])

    assert len(found) == 2
    assert_close(
        found[:1], action_features(tiny_model, [renderer.encode(episode("north"))])[0], atol=1e-6, rtol=0
    )


def test_linear_contributions_are_recovered_from_their_sums():
    """Shares w x + b without noise; b counts once a turn, and one feature is constant."""
    features = drawn(episodes=60, features=6)
    weight = torch.tensor([0.0, 1.0, -2.0, 0.5, 0.0, 0.01], dtype=torch.float64)
    shares = [rows.double() @ weight + 0.25 for rows in features]

    found = own_of(cross_fit_sums(features, [float(own.sum()) for own in shares]))

    for ours, theirs in zip(found, shares, strict=True):
        assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_turns_alone_get_an_even_share():
    """Features of nothing: b = sum T S / sum T^2 of the other folds, for 1 x 1, 2 x 4 and 3 x 3 by hand; not S / T."""
    lengths, scores = [1, 2, 3], [1.0, 4.0, 3.0]
    features = [torch.full((length, 2), 5.0) for length in lengths]

    found = own_of(cross_fit_sums(features, scores))

    assert found[0].tolist() == pytest.approx([(8 + 9) / (4 + 9)])
    assert found[1].tolist() == pytest.approx([(1 + 9) / (1 + 9)] * 2)
    assert found[2].tolist() == pytest.approx([(1 + 8) / (1 + 4)] * 3)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_head_is_the_ridge_regression_that_it_says(penalty):
    """Against the normal equations of mean features, weighed by T^2: another way to write sums."""
    features = [rows.double() for rows in drawn(episodes=40, features=5)]
    scores = torch.stack([rows.sin().sum() for rows in features])
    count = torch.tensor([float(len(rows)) for rows in features], dtype=torch.float64)
    x, y = torch.stack([rows.mean(0) for rows in features]), scores / count
    share = count.square() / count.square().sum()
    center, level = share @ x, share @ y
    spread = (share @ (x - center).square()).sqrt()
    live = ((x - center) / spread)[:, 1:]
    system = live.T @ (share[:, None] * live) + penalty * 5 * torch.eye(4, dtype=torch.float64)
    weight = torch.linalg.solve(system, live.T @ (share * (y - level)))
    expected = [((rows - center) / spread)[:, 1:] @ weight + level for rows in features]
    joined = torch.cat([count[:, None] * x, count[:, None], scores[:, None]], 1)

    head = _fit(joined.T @ joined, penalty)

    for rows, theirs in zip(features, expected, strict=True):
        assert_close(rows @ head[:-2] + head[-2], theirs, rtol=1e-6, atol=1e-8)


def test_an_episode_changes_nothing_of_its_own_contributions():
    """Neither what it earned nor how: those of others change."""
    features = drawn(episodes=23, features=4)
    scores = [float(rows.double().sum()) for rows in features]
    before = own_of(cross_fit_sums(features, scores))

    for index in (0, 7, 22):
        changed = [score + 100 * (i == index) for i, score in enumerate(scores)]
        other = own_of(cross_fit_sums(features, changed))
        assert_close(other[index], before[index], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(other[(index + 1) % 23], before[(index + 1) % 23], atol=1e-2)


def test_nothing_of_an_episode_is_in_what_its_head_says():
    """Neither of its own turns nor of other episodes: cut it off, and all by that head stays."""
    features = drawn(episodes=23, features=4)
    scores = [float(rows.double().sum()) for rows in features]
    before = cross_fit_sums(features, scores)

    cut = cross_fit_sums([*features[:4], features[4][:2], *features[5:]], [*scores[:4], 7.0, *scores[5:]])

    assert before[4].shape == (5, 5)
    assert_close(cut[4][4], before[4][4, :2], rtol=1e-9, atol=1e-9)
    for one, other in zip(cut[5:], before[5:], strict=True):
        assert_close(one[4], other[4], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(one[0], other[0], atol=1e-2)


def test_contributions_of_few_episodes(renderer, tiny_model):
    """One has nobody to learn from; of two, each has the other's mean a turn."""
    sequences = [renderer.encode(one) for one in EPISODES[:2]]

    assert turn_contributions(tiny_model, [], []) == []
    assert turn_contributions(tiny_model, sequences[:1], [1.0]) == [Shares([[0.0] * 3])]
    first, second = turn_contributions(tiny_model, sequences, [3.0, 5.0])
    assert first.own == pytest.approx([5.0] * 3, abs=1e-6)
    assert second.own == pytest.approx([1.0], abs=1e-6)
    assert first.by(second.head) == pytest.approx([1.0] * 3, abs=1e-6)
    assert second.by(first.head) == pytest.approx([5.0], abs=1e-6)


def test_packing_does_not_change_contributions(renderer, tiny_model):
    """Each episode alone in its pass, or all in one."""
    sequences, scores = [renderer.encode(one) for one in EPISODES], [0.0, 1.0, 0.0, 1.0, 0.5]

    alone, together = (turn_contributions(tiny_model, sequences, scores, budget) for budget in (1, 100_000))

    for one, other in zip(alone, together, strict=True):
        assert one.head == other.head
        assert_close(torch.tensor(one.heads), torch.tensor(other.heads), atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class Learned:
    """SPA with a head on features of what had happened up to each turn, its action included."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits()

    wrong: str = ""
    """`own`: the head has learned from the episode too; `others`: those of others by heads that have."""
    residual: bool = True

    def __call__(self, group, **_):
        """Features, contributions, advantages."""
        credit = CREDITS["spa"](residual=self.residual)
        features = [self._features(one) for one in group]
        scores = [math.fsum(turn.reward for turn in one.turns) for one in group]
        if self.wrong == "own":  # every episode is in each fold twice
            tables = cross_fit_sums([*features, *features], [*scores, *scores])[: len(group)]
        else:
            tables = cross_fit_sums(features, scores)
        shares = [Shares(each.tolist(), index % len(each)) for index, each in enumerate(tables)]
        return credit(group, contributions=[one.own for one in shares] if self.wrong == "others" else shares)

    def _features(self, trajectory):
        """Three numbers that depend on the actions so far, this one among them, and on the state."""
        found = []
        for t, turn in enumerate(trajectory.turns):
            seen = "".join(each.action.text for each in trajectory.turns[: t + 1]) + turn.state_key
            found.append([float(t), float(sum(map(ord, seen)) % 7), float(turn.state_key)])
        return torch.tensor(found)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_a_head_that_is_fitted_on_other_episodes_leaves_the_gradient_exact(process, size):
    """All groups that a process can give, with the choice of the penalty: no bias, and no factor."""
    found = measure(Learned(), process, size)

    assert found.relative_bias <= 1e-9
    assert found.scale == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        *(pytest.param({"wrong": whose}, marks=pytest.mark.slow) for whose in ("own", "others")),
        {"residual": False},
    ],
)
def test_what_would_bias_is_seen_to(wrong):
    """A head that knows the score, heads of others that know it, and a score that is left to the head."""
    assert measure(Learned(**wrong), PROCESSES[3], 3).relative_bias > 1e-3
