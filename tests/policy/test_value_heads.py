"""Values of turns: hidden states of the policy, a head that never learns from the episode it is asked about."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN
from perturn.credit import CREDITS
from perturn.credit.protocol import CreditTraits
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES
from perturn.needs import Needs
from perturn.policy.value_heads import (
    PENALTIES,
    _fit,
    cross_fit,
    explained_variance,
    turn_features,
    turn_values,
)
from support.valued import EPISODES, drawn, episode

from .training import asked


@pytest.mark.parametrize("budget", [1, 100_000])
def test_features_are_the_last_hidden_states_of_a_plain_forward(renderer, tiny_model, budget):
    """At the last token of what the policy saw then, whatever else is in the pack; in float32, without gradient."""
    expected = []
    for one in EPISODES:
        prompts = [torch.tensor([ids]) for ids in asked(renderer, one)]
        with torch.no_grad():
            states = [tiny_model(ids, output_hidden_states=True).hidden_states[-1][0, -1] for ids in prompts]
        expected.append(torch.stack(states))
    assert [len(each) for each in expected] == [3, 1, 4, 2, 3]

    sequences = [renderer.encode(one) for one in EPISODES]
    found = turn_features(tiny_model, sequences, [[1] * len(one.turns) for one in EPISODES], budget)

    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert ours.dtype == torch.float32
        assert not ours.requires_grad


def test_features_have_seen_nothing_of_the_action(renderer, tiny_model):
    """Another last action changes none; the next turn's would."""
    one, other = episode("north", "wait"), episode("north", "open the door")
    first, second = (turn_features(tiny_model, [renderer.encode(each)], [[1, 1]])[0] for each in (one, other))

    assert_close(first, second, atol=1e-6, rtol=0)
    third = turn_features(tiny_model, [renderer.encode(episode("wait", "wait"))], [[1, 1]])[0]
    assert not torch.allclose(first[1], third[1], atol=1e-3)


def test_as_many_tokens_of_a_turn_as_are_wanted(renderer, tiny_model):
    """The first two of the first turn, and all of the second: states before each of these tokens."""
    encoded = renderer.encode(EPISODES[0])
    lengths = [encoded.loss_turns.count(turn) for turn in range(3)]
    at = [place for place, turn in enumerate(encoded.turn) if turn != NO_TURN]
    wanted = [*at[:2], *at[lengths[0] : lengths[0] + lengths[1]], at[lengths[0] + lengths[1]]]
    with torch.no_grad():
        states = tiny_model(torch.tensor([encoded.ids]), output_hidden_states=True).hidden_states[-1][0]

    (found,) = turn_features(tiny_model, [encoded], [[2, lengths[1], 1]])

    assert_close(found, states[[place - 1 for place in wanted]], atol=1e-5, rtol=1e-5)


def test_a_linear_value_is_recovered():
    """V = w x + b without noise: from other episodes alone, to the smallest penalty's share."""
    features = drawn(episodes=60, features=6)
    weight = torch.tensor([0.0, 1.0, -2.0, 0.5, 0.0, 0.01], dtype=torch.float64)
    targets = [rows.double() @ weight + 0.25 for rows in features]

    found = cross_fit(features, targets)

    for ours, theirs in zip(found, targets, strict=True):
        assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_noise_alone_is_shrunk_to_the_mean():
    """As many features as turns: a fit without a penalty would be far off."""
    features = drawn(episodes=30, features=90)
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randn(len(rows), generator=generator, dtype=torch.float64) + 5 for rows in features]

    found = torch.cat(cross_fit(features, targets))

    assert float((found - 5).std()) < 0.3
    assert float(found.mean()) == pytest.approx(5, abs=0.3)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_head_is_the_ridge_regression_that_it_says(penalty):
    """Against the normal equations of standardized features, row by row."""
    rows = torch.cat(drawn(episodes=20, features=5)).double()
    target = rows.sin().sum(1)
    joined = torch.cat([rows, torch.ones(len(rows), 1), target[:, None]], 1)
    live = (rows - rows.mean(0))[:, 1:] / rows.std(0, correction=0)[1:]
    system = live.T @ live / len(live) + penalty * 5 * torch.eye(4, dtype=torch.float64)
    weight = torch.linalg.solve(system, live.T @ (target - target.mean()) / len(live))
    expected = live @ weight + target.mean()

    head = _fit(joined.T @ joined, penalty)

    assert_close(joined[:, :-1] @ head[:-1], expected, rtol=1e-6, atol=1e-8)


def test_an_episode_changes_nothing_of_its_own_value():
    """Neither what it earned nor what else it saw, for the penalty and the scales are of others too."""
    features = drawn(episodes=23, features=4)
    targets = [rows.double().sum(1) for rows in features]
    before = cross_fit(features, targets)

    for index in (0, 7, 22):
        changed = [target + 100 if i == index else target for i, target in enumerate(targets)]
        other = cross_fit(features, changed)
        assert_close(other[index], before[index], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(other[(index + 1) % 23], before[(index + 1) % 23], atol=1e-2)


def test_values_of_few_episodes(renderer, tiny_model):
    """One has nobody to learn from; of two, each has the other's mean, for nothing says how far to trust more."""
    targets = [[[1.0], [1.0], [1.0]], [[3.0]]]
    sequences = [renderer.encode(one) for one in EPISODES[:2]]

    assert turn_values(tiny_model, [], []) == []
    assert turn_values(tiny_model, sequences[:1], targets[:1]) == [[[0.0]] * 3]
    (first, second) = turn_values(tiny_model, sequences, targets)
    assert first == [pytest.approx([3.0], abs=1e-9)] * 3
    assert second == [pytest.approx([1.0], abs=1e-9)]


def test_packing_does_not_change_values(renderer, tiny_model):
    """Each episode alone in its pass, or all in one."""
    sequences = [renderer.encode(one) for one in EPISODES]
    targets = [[[float(turn)] for turn in range(len(one.turns))] for one in EPISODES]

    alone, together = (turn_values(tiny_model, sequences, targets, budget) for budget in (1, 100_000))

    for one, other in zip(alone, together, strict=True):
        assert_close(torch.tensor(one), torch.tensor(other), atol=1e-4, rtol=1e-4)


def test_explained_variance_worked_by_hand():
    """G = 0, 1, 1, 0 and V = 0, 1, 0, 0: var(G - V) = 3/16, var(G) = 4/16; only first tokens count."""
    targets = [[[0.0], [1.0]], [[1.0], [0.0]], []]

    assert explained_variance([[[0.0, 9.0], [1.0]], [[0.0], [0.0]], []], targets) == pytest.approx(1 / 4)
    assert explained_variance(targets, targets) == 1
    assert explained_variance([[[0.5], [0.5]], [[0.5], [0.5]], []], targets) == 0
    assert explained_variance([[[0.5]]], [[[1.0]]]) is None
    assert explained_variance([], []) is None


@dataclass(frozen=True)
class Learned:
    """Turn-GAE with a head on features of what had happened before each turn."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits()

    leaks: str = ""
    """`action`: the features have seen the action; `own`: the head has learned from the episode too."""
    lam: float = 1.0

    def __call__(self, group, **_):
        """Features, values, advantages."""
        credit = CREDITS["turn-gae"](lam=self.lam)
        lengths = [[1] * len(one.turns) for one in group]
        targets = [
            torch.tensor(of_one, dtype=torch.float64)[:, 0] for of_one in credit.value_targets(group, lengths)
        ]
        features = [self._features(one) for one in group]
        if self.leaks == "own":  # every episode has itself in each other fold
            values = cross_fit([torch.cat(features)] * 2, [torch.cat(targets)] * 2)[0]
            values = values.split([len(one) for one in features])
        else:
            values = cross_fit(features, targets)
        return credit(group, values=[value.tolist() for value in values])

    def _features(self, trajectory):
        """Three numbers that depend on the actions so far, and on the state."""
        found = []
        for t, turn in enumerate(trajectory.turns):
            before = trajectory.turns[: t + (self.leaks == "action")]
            seen = "".join(each.action.text for each in before) + turn.state_key
            found.append([float(t), float(sum(map(ord, seen)) % 7), float(turn.state_key)])
        return torch.tensor(found)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_a_head_that_is_fitted_on_other_episodes_leaves_the_gradient_exact(process, size):
    """All groups that a process can give, with the choice of the penalty: no bias, and no factor."""
    found = measure(Learned(), process, size)

    assert found.relative_bias <= 1e-9
    assert found.scale == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("wrong", [{"leaks": "action"}, {"leaks": "own"}, {"lam": 0.5}])
def test_what_would_bias_is_seen_to(wrong):
    """A value that knows the action, a head that knows the return, and a value that stands in for rewards."""
    assert measure(Learned(**wrong), PROCESSES[3], 3).relative_bias > 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("turn-gae", {"gamma": 0.5}, [[[1.5], [1.0]], [], [[2.0]]]),
        (
            "bi-level-gae",
            {"gamma": 0.5, "high_level_gamma": 0.25},
            [[[0.3125, 0.625, 1.25], [1.0]], [], [[1.0, 2.0]]],
        ),
    ],
)
def test_what_values_stand_for(name, settings, expected):
    """Rewards 1 and 1: returns 1.5 and 1 at discount 1/2; 1.25 and 1 at 1/4, halved from token to token."""
    group = [episode("a", "b"), episode(), episode("c")]
    rewards = [[1.0, 1.0], [], [2.0]]
    group = [
        replace(
            one,
            turns=tuple(replace(turn, reward=r) for turn, r in zip(one.turns, each, strict=True)),
            total_reward=sum(each),
        )
        for one, each in zip(group, rewards, strict=True)
    ]

    assert CREDITS[name](**settings).value_targets(group, [[3, 1], [], [2]]) == expected


def test_rows_without_a_return_are_valued_and_not_learned_from():
    """As if they were left out of every fit; their own V is by heads that have seen none of their episode."""
    features = drawn(episodes=20, features=3)
    targets = [rows.double().sum(1) for rows in features]
    hidden = [3, 8, 14]  # of three folds; the others keep theirs
    some = [target * torch.nan if i in hidden else target for i, target in enumerate(targets)]
    fold = [i for i in range(20) if i % 5 != 0 and i not in hidden]
    joined = torch.cat(
        [
            torch.cat([features[i].double(), torch.ones(len(targets[i]), 1), targets[i][:, None]], 1)
            for i in fold
        ]
    )

    found = cross_fit(features, some)

    weight = torch.linalg.lstsq(joined[:, :-1], joined[:, -1:]).solution[:, 0]
    assert_close(found[0], features[0].double() @ weight[:-1] + weight[-1], rtol=1e-3, atol=1e-3)
    assert all(values.isfinite().all() for values in found)
    assert_close(found[3], targets[3], rtol=1e-3, atol=1e-3)
    assert explained_variance(
        [[[v] for v in own.tolist()] for own in found], [[[v] for v in own.tolist()] for own in some]
    ) == pytest.approx(1, abs=1e-3)


def test_where_no_return_is_known_v_is_nothing():
    """All episodes were cut; and where one alone was not, the others have its mean."""
    features = drawn(episodes=6, features=3)
    unknown = [torch.full((len(rows),), torch.nan, dtype=torch.float64) for rows in features]

    assert all(not own.any() for own in cross_fit(features, unknown))
    assert explained_variance([[[0.0]]], [[[float("nan")]]]) is None
    one = [torch.full_like(unknown[0], 0.5), *unknown[1:]]
    found = cross_fit(features, one)
    assert not found[0].any()
    assert found[1].tolist() == pytest.approx([0.5] * len(found[1]))
