"""Credits that train on branches: trees of hand-worked episodes, and every tree of small processes."""

import math
from dataclasses import replace

import pytest
import torch

from perturn.credit import CREDITS
from perturn.credit.branch_forest import forest
from perturn.credit_check.meter import _compare, tree_estimates
from perturn.credit_check.processes import PROCESSES
from perturn.credit_check.trees import list_groups, list_trees
from perturn.types import Action, Status
from support.crossed import crossed

LOOP, NEUTRAL, FORK, SHARED = PROCESSES
TREES = {"value": "leaves", "baseline": "group", "normalize": "std", "count": "leaves"}
"""The paper's form of portool."""


def branch(one, origin, taken_over):
    return replace(one, origin=origin, taken_over=taken_over)


@pytest.fixture
def group(episode):
    """Sample 0 is played on before turn 1, once, and before turn 2, twice; sample 1 is not.

    0: 0 | 0 | 1         leaves 1; from turn 1: 0.5; from turn 2: 0 and 1
    1: 0.25
    """

    def row(rewards, sample):
        return episode([None] * len(rewards), rewards, sample=sample)

    return [
        row([0.0, 0.0, 1.0], 0),
        row([0.25], 1),
        branch(row([0.0, 0.5], 2), 0, 1),
        branch(row([0.0, 0.0, 0.0], 3), 0, 2),
        branch(row([0.0, 0.0, 1.0, 0.0], 4), 0, 2),
    ]


def rewards_of(group):
    return [[turn.reward for turn in one.turns] for one in group]


def weights(credit, group):
    return [one.tolist() for one in credit(group)]


def test_hand_worked_forest(group):
    """Behind the second fork 1, 0 and 1, so 2/3; behind the first 2/3 and 1/2, so 7/12, or 5/8 over four leaves."""
    tree, other = forest(group, rewards_of(group))
    found = {(each.member, each.start, each.stop): each for each in tree.stretches}

    assert found.keys() == {(0, 0, 1), (0, 1, 2), (2, 1, 2), (0, 2, 3), (3, 2, 3), (4, 2, 4)}
    assert [found[key].value for key in found] == pytest.approx([7 / 12, 2 / 3, 0.5, 1.0, 0.0, 1.0])
    assert [found[key].leaves for key in found] == [4, 3, 1, 1, 1, 1]
    assert [found[key].share for key in found] == pytest.approx([1, 1 / 2, 1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert found[0, 2, 3].siblings == (0.0, 1.0)
    assert found[0, 0, 1].siblings == (0.25,)
    assert sorted(tree.scores) == [0.0, 0.5, 1.0, 1.0]
    assert other.value == 0.25
    assert forest(group, rewards_of(group), "leaves")[0].value == 0.625


def test_hand_worked_portool(group):
    """Blend 1/2, others: the first turn 7/12 - 1/4 by both.

    Behind the forks halves and sixths of
    2/3 - 1/2 and 2/3 - 1/4; 1/2 - 2/3 and 1/2 - 1/4; 1 - 1/2 and 1 - 1/4; 0 - 1 and 0 - 1/4. The other: 1/4 - 7/12.
    """
    found = weights(CREDITS["portool"](), group)

    assert found[0] == pytest.approx([1 / 3, (1 / 6 + 5 / 12) / 4, (1 / 2 + 3 / 4) / 12])
    assert found[1] == pytest.approx([-1 / 3])
    assert found[2] == pytest.approx([0, (-1 / 6 + 1 / 4) / 4])
    assert found[3] == pytest.approx([0, 0, (-1 - 1 / 4) / 12])
    assert found[4] == pytest.approx([0, 0, (1 / 2 + 3 / 4) / 12, (1 / 2 + 3 / 4) / 12])
    within = weights(CREDITS["portool"](blend=0.0, count="once"), group)
    assert within[0] == pytest.approx([1 / 3, 1 / 6, 1 / 2])
    assert weights(CREDITS["portool"](blend=0.0, count="leaves"), group)[0] == pytest.approx(
        [4 / 3, 1 / 2, 1 / 2]
    )


def test_hand_worked_portool_as_in_its_paper(group):
    """Leaves 1, 1/2, 0, 1 and 1/4: mean 11/20; values of the last fork 1, 0 and 1, with deviation 1 / sqrt 3."""
    found = weights(CREDITS["portool"](**TREES), group)
    scores = [1.0, 0.5, 0.0, 1.0, 0.25]
    spread = math.sqrt(sum((one - 0.55) ** 2 for one in scores) / 4) + 1e-6

    assert found[3][2] == pytest.approx(-(2 / 3) / (1 / math.sqrt(3) + 1e-6) / 2 - 0.55 / spread / 2)


def test_hand_worked_arpo(group):
    """Without division: four leaves share the first turn, 1 + 1/2 + 0 + 1 - 4 * 11/20; three the second."""
    found = weights(CREDITS["arpo"](normalize="mean"), group)

    assert found[0] == pytest.approx([0.3, 0.35, 0.45])
    assert found[1:] == [
        pytest.approx(each) for each in ([-0.3], [0, -0.05], [0, 0, -0.55], [0, 0, 0.45, 0.45])
    ]
    means = weights(CREDITS["arpo"](normalize="mean", shared="mean"), group)
    assert means[0] == pytest.approx([0.075, 0.35 / 3, 0.45])


def test_branches_of_nobody_or_of_no_turn_are_refused(group):
    for changed, said in [
        (replace(group[2], origin=7), "sample 2 is a branch of 7, which is not in the group"),
        (replace(group[2], taken_over=3), "must share some turns of sample 0, and not all of its 3, got 3"),
        (replace(group[2], taken_over=0), "must share some turns of sample 0"),
    ]:
        with pytest.raises(ValueError, match=said):
            CREDITS["portool"]()([*group[:2], changed])


def test_a_branch_of_a_branch_is_refused(group, episode):
    """Sample 5 did otherwise at turn 1 than sample 0, with which it says to share two turns."""
    other = branch(episode([None] * 3, [0.0, 0.0, 1.0], sample=5), 0, 2)
    turns = (other.turns[0], replace(other.turns[1], action=Action("otherwise")), other.turns[2])

    for name in ("portool", "arpo"):
        with pytest.raises(ValueError, match="its first 2 turns with sample 0, and did otherwise at turn 1"):
            CREDITS[name]()([*group, replace(other, turns=turns)])


def test_episodes_that_have_no_number_are_all_weighed(episode):
    """As rows of training that were made by hand; a branch of one of them would be nobody's."""
    group = [episode([None], [reward]) for reward in (1.0, 0.0, 0.5)]

    assert weights(CREDITS["portool"](), group) == weights(CREDITS["rloo"](), group)
    with pytest.raises(ValueError, match="branch of 0, which is 2 times in the group"):
        CREDITS["portool"]()([*group[:2], branch(episode([None] * 2, [0.0, 0.0], sample=3), 0, 1)])


def test_leaves_of_equal_rewards_are_equal(episode):
    """0.1 + 0.2 and then 0.3 are no more than 0.1 + 0.2 + 0.3 at once, nor a million times as much."""
    for unit in (1.0, 1e6):
        rewards = [0.1 * unit, 0.2 * unit, 0.3 * unit]
        one = episode([None] * 3, rewards)

        assert weights(CREDITS["arpo"](), [one, branch(replace(one, sample=1), 0, 2)]) == [[0.0] * 3] * 2


def test_trees_that_are_worth_nearly_the_same_blow_nothing_up(episode):
    """Both are worth 1/2 but for 1e-7, by leaves of about 0 and 1: over a deviation of 0.577, 0.5 is 0.866."""

    def tree(sample, end):
        one = episode([None] * 2, [0.0, end], sample=sample)
        return [one, branch(episode([None] * 2, [0.0, 0.0], sample=sample + 2), sample, 1)]

    group = [*tree(0, 1.0), *tree(1, 1.0 + 2e-7)]
    found = weights(CREDITS["portool"](blend=1.0, normalize="std"), group)

    assert found[0] == pytest.approx([0.0, 0.5 / math.sqrt(1 / 3) / 2], abs=1e-5)


def test_the_order_of_trees_changes_no_bit(group):
    order = [3, 1, 4, 0, 2]
    for name in ("portool", "arpo"):
        credit = CREDITS[name]()
        for one, at in zip(credit([group[i] for i in order]), order, strict=True):
            assert torch.equal(one, credit(group)[at])


def test_what_failed_counts_with_nothing(group):
    """A branch that FAILED on turns of its own earns nothing; its tree is compared with it."""
    failed = [*group[:4], replace(group[4], status=Status.FAILED)]

    assert forest(failed, [*rewards_of(group)[:4], [0.0] * 4])[0].value == pytest.approx((1 / 3 + 0.5) / 2)
    assert weights(CREDITS["portool"](), failed)[0][0] == pytest.approx((1 / 3 + 0.5) / 2 - 0.25)


def test_without_branches_they_are_rloo_and_grpo(scored):
    group = scored(1.0, 0.0, 0.5)

    assert weights(CREDITS["portool"](), group) == weights(CREDITS["rloo"](), group)
    assert weights(CREDITS["arpo"](), group) == weights(CREDITS["grpo"](), group)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_all_trees_are_listed(process):
    trees = list_trees(process.episodes, 1, 1)

    assert sum(tree.probability for tree in trees) == pytest.approx(1)
    assert sum(
        chance for *_, chance in list_groups(process.episodes, list_trees(process.episodes, 2, 2), 2)
    ) == (pytest.approx(1))
    for tree in trees:
        explored, *branches = tree.trajectories(process.episodes, 0, 1)
        for one in branches:
            assert one.turns[: one.taken_over] == explored.turns[: one.taken_over]
        assert [one.taken_over for one in branches] == list(range(1, len(explored.turns)))


@pytest.mark.parametrize(("blend", "where"), crossed([0.5, 0.0, 1.0], [(NEUTRAL, 2), (FORK, 1), (SHARED, 1)]))
def test_nested_forks_bend_nothing(blend, where):
    """Every turn played on from; any blend, and any process with so many samples."""
    process, samples = where
    estimates, chances, _ = tree_estimates(CREDITS["portool"](blend=blend), process.episodes, 2, 1, samples)
    _, scale, bias, _ = _compare(estimates, chances, process.episodes.gradient(1.0))

    assert bias <= 1e-9
    assert scale == pytest.approx(1)


@pytest.mark.parametrize(("every", "expected"), [(1, 0.082), (2, 0.0)])
def test_values_of_leaves_do_where_forks_are_nested(every, expected):
    """A child that is forked again has more leaves: 0.082 of it, where one fork alone costs nothing."""
    estimates, chances, _ = tree_estimates(CREDITS["portool"](value="leaves"), SHARED.episodes, 2, every)
    bias = _compare(estimates, chances, SHARED.episodes.gradient(1.0))[2]

    assert bias == pytest.approx(expected, abs=5e-4)


def by_state(episodes):
    """Turns in states of odd number, which are known when they are reached."""
    return lambda episode, turn: episodes.steps[episode][turn].state % 2 == 1


def by_end(episodes):
    """Turns of episodes that end with a success, which is known when they end."""
    return lambda episode, turn: episodes.ends[episode].success


def compared(credit, process, groups):
    """Scale and relative bias by so listed groups of trees."""
    estimates, chances = [], []
    for group, members, chance in groups:
        found = torch.zeros(process.episodes.parameters, dtype=torch.float64)
        for member, weight in zip(members, credit(group), strict=True):
            found += weight @ process.episodes.score[member, : len(weight)]
        explored = sum(one.origin is None for one in group)
        estimates.append(found / explored)
        chances.append(chance)
    assert sum(chances) == pytest.approx(1)
    figures = _compare(
        torch.stack(estimates), torch.tensor(chances, dtype=torch.float64), process.episodes.gradient(1.0)
    )
    return figures[1:3]


@pytest.mark.parametrize(("rule", "holds"), [(by_state, True), (by_end, False)])
def test_forks_that_are_chosen_by_what_is_known_bend_nothing(rule, holds):
    """And those that are chosen by how the episode ends do, though no child of a fork is left out."""
    episodes = SHARED.episodes
    trees = list_trees(episodes, 1, 1, rule(episodes))
    assert 0 < sum(bool(tree.branches) for tree in trees) < len(trees)

    scale, bias = compared(CREDITS["portool"](), SHARED, list_groups(episodes, trees, 2))

    assert (bias <= 1e-9 and scale == pytest.approx(1)) is holds
    assert holds or bias > 0.005 or abs(scale - 1) > 0.005


@pytest.mark.parametrize("mutual", [False, True])
def test_forks_that_two_trees_choose_for_each_other_bend_their_comparison(mutual):
    """So a predictor learns from other tasks where branches are trained on: one way alone it bends nothing.

    The first tree is forked where the other explored episode succeeded; and the other one where the first did, or not.
    """
    episodes = SHARED.episodes
    whole, none = list_trees(episodes, 1, 1), list_trees(episodes, 1, 1, lambda *_: False)

    def trees(explored, forked):
        return [tree for tree in (whole if forked else none) if tree.explored == explored]

    def groups():
        for one in range(len(episodes.steps)):
            for other in range(len(episodes.steps)):
                other_forked = mutual and episodes.ends[one].success
                for first in trees(one, episodes.ends[other].success):
                    for second in trees(other, other_forked):
                        own, others = first.trajectories(episodes, 0, 2), second.trajectories(episodes, 1, 20)
                        members = [
                            each
                            for tree in (first, second)
                            for each in (tree.explored, *(e for _, e in tree.branches))
                        ]
                        yield [*own, *others], members, first.probability * second.probability

    scale, bias = compared(CREDITS["portool"](), SHARED, groups())

    assert (bias <= 1e-9 and scale == pytest.approx(1)) is not mutual
