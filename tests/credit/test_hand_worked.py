"""A value of every credit of a group, worked by hand."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit.bi_level_gae import bi_level_advantages
from perturn.credit.group_statistics import generalized_advantages
from perturn.types import Action, Turn


def assert_weights(found, expected, atol=2e-6):
    """2e-6 covers the 1e-6 that peers add to a deviation."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, torch.tensor(other, dtype=torch.float64), rtol=0, atol=atol)


def test_grpo(scored):
    """Mean 1/2. Sample deviation sqrt(3 / 3) = 1: 3/2 / 1; the population's sqrt(3/4): 1.732051."""
    group = scored(2.0, 0.0, 0.0, 0.0)

    assert_weights(CREDITS["grpo"]()(group), [[1.5], [-0.5], [-0.5], [-0.5]])
    assert_weights(CREDITS["grpo"](std="population")(group)[:1], [[1.732051]], atol=5e-6)
    assert_weights(CREDITS["grpo"](normalize="mean")(group), [[1.5], [-0.5], [-0.5], [-0.5]])
    assert_weights(CREDITS["dr-grpo"]()(group), [[1.5], [-0.5], [-0.5], [-0.5]])


def test_maxrl(scored):
    """(1 - 1/5) / (1/5) = 4."""
    assert_weights(CREDITS["maxrl"]()(scored(1.0, 0.0, 0.0, 0.0, 0.0)), [[4.0], *[[-1.0]] * 4], atol=3e-5)
    with pytest.raises(ValueError, match=r"maxrl needs scores >= 0, got -1\.0"):
        CREDITS["maxrl"]()(scored(1.0, -1.0))


def test_maxrl_takes_a_score_below_zero_by_rounding_for_zero(scored):
    """0.3 - 0.1 - 0.2 is -2.8e-17."""
    assert 0.3 - 0.1 - 0.2 < 0
    assert_weights(CREDITS["maxrl"]()(scored(1.0, 0.3 - 0.1 - 0.2)), [[1.0], [-1.0]], atol=3e-6)


def test_rloo(scored):
    """1 - 0 and 0 - 1/2."""
    assert_weights(CREDITS["rloo"]()(scored(1.0, 0.0, 0.0)), [[1.0], [-0.5], [-0.5]])


def test_statistics_over_steps_are_another_thing_and_must_be_asked_for(episode):
    """Scores 2, 0, 1 over 1, 2, 3 turns: means 1 and 5/6; a step left out of six: 6/5 of what is over 5/6."""
    group = [episode([None] * n, [0.0] * (n - 1) + [s], sample=n) for n, s in ((1, 2.0), (2, 0.0), (3, 1.0))]

    assert_weights(CREDITS["dr-grpo"]()(group), [[1.0], [-1.0] * 2, [0.0] * 3])
    assert_weights(CREDITS["dr-grpo"](statistics="steps")(group), [[7 / 6], [-5 / 6] * 2, [1 / 6] * 3])
    assert_weights(CREDITS["rloo"](statistics="steps")(group), [[1.4], [-1.0] * 2, [0.2] * 3])


def test_reinforce(scored, episode):
    """Mean 1/3, variance 1/3: 2/3 / sqrt(1/3) = 1.154701. A reward at the end is the return of every turn before."""
    group = [episode([None] * 3, [0.0, 0.0, 1.0]), *scored(0.0, 0.0)]

    assert_weights(CREDITS["reinforce++"]()(group), [[1.154701] * 3, [-0.57735], [-0.57735]])
    assert_weights(CREDITS["reinforce++"](baseline=True)(group), [[1.154701] * 3, [-0.57735], [-0.57735]])
    assert_weights(CREDITS["reinforce++"](gamma=0.5)(group)[:1], [[1.154701, 2.886751, 6.350853]])


def test_reinforce_whitens_over_all_tasks_of_a_call(episode):
    """Scores 2, 0 and 1, 1 of two tasks: less their means 1, -1, 0, 0, with deviation sqrt(2/3)."""
    group = [
        episode([None], [score], task=task)
        for task, score in (("s", 2.0), ("s", 0.0), ("t", 1.0), ("t", 1.0))
    ]

    assert_weights(CREDITS["reinforce++"](baseline=True)(group), [[1.224745], [-1.224745], [0.0], [0.0]])


def test_trloo(walk):
    """Returns 1 1, 0 0, 1 1 1. The third turn has no other: the others' mean, 1/2."""
    assert_weights(CREDITS["trloo"]()(walk), [[0.5, 0.5], [-1.0, -1.0], [0.5, 0.5, 0.5]])


def test_anchor_rloo(walk):
    """At a: 1 - (0 + 1 + 1)/3; 0 - 1; 1 - (1 + 0)/2 twice. At b: 1 - 0, 0 - 1. At c none: 1 - (1 + 0)/2."""
    assert_weights(CREDITS["anchor-rloo"]()(walk), [[1 / 3, 1.0], [-1.0, -1.0], [0.5, 0.5, 0.5]])


def test_anchor_rloo_with_discount(walk):
    """Gamma 1/2, returns 1/2 1, 0 0, 1/4 1/2 1.

    At a: 1/2 - (0 + 1/4 + 1/2)/3 = 1/4; -(1/2 + 1/4 + 1/2)/3; 1/4 - (1/2 + 0)/2 = 0; 1/2 (1/2 - 1/4). At b:
    1/2 (1 - 0), 1/2 (0 - 1). At c none: 1/4 - (1/2 + 0)/2.
    """
    assert_weights(CREDITS["anchor-rloo"](gamma=0.5)(walk), [[0.25, 0.5], [-5 / 12, -0.5], [0.0, 0.125, 0.0]])


def test_gigpo(walk):
    """Gamma 1: A_E 1/3 and -2/3. A_S at a, mean 3/4: 1/4, -3/4, 1/4, 1/4; at b 1/2, -1/2; at c 0."""
    assert_weights(
        CREDITS["gigpo"](gamma=1.0)(walk),
        [[7 / 12, 5 / 6], [-17 / 12, -7 / 6], [7 / 12, 7 / 12, 1 / 3]],
    )
    assert_weights(CREDITS["gigpo"](gamma=1.0, omega=0.0)(walk), [[1 / 3] * 2, [-2 / 3] * 2, [1 / 3] * 3])


def test_gigpo_takes_an_invalid_turns_penalty_off_that_turn_alone(episode):
    """Scores 1 and 0, both at a: A_E 1/2 and -1/2, A_S the same; 0.2 off A_E and, of two, 0.1 off A_S of the second."""
    group = [episode(["a"], [1.0]), episode(["a"], [0.0], valid=[False], sample=1)]

    assert_weights(CREDITS["gigpo"](invalid_penalty=0.2)(group), [[1.1], [-1.3]])


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_similar_states_are_one_whatever_the_order(episode, order):
    """One letter of 30 differs between neighbours, two between the ends: all three are joined through the middle."""
    keys = ["x" * 30, "x" * 29 + "y", "x" * 28 + "yy"]
    group = [episode([key], [float(i)], sample=i) for i, key in enumerate(keys)]

    found = CREDITS["gigpo"](similarity=0.96)([group[i] for i in order])

    assert_weights(found, [[2.0 * (i - 1)] for i in order])


def test_hgpo(walk):
    """Gamma 1, weights 2 and 3. After a-b both lengths say 1/2; a-a and a-c are alone."""
    assert_weights(
        CREDITS["hgpo"](gamma=1.0, history=1)(walk),
        [[0.25, 0.5], [-0.75, -0.5], [0.25, 0.25, 0.0]],
    )


def test_graphgpo(walk):
    """Distances b 1, c 1, a 2, the failure's end 3; omega 1/2.

    Out of a: 5, 5, 2.5 (to a), 5: mean 4.375, deviation 1.25. Out of b: 10 and 1.25. A_E: 1/3 / 0.57735.
    """
    assert_weights(
        CREDITS["graphgpo"](omega=0.5)(walk),
        [[1.07735, 1.284457], [-0.654701, -1.861807], [-0.92265, 1.07735, 0.57735]],
        atol=5e-6,
    )


def test_graphgpo_without_a_success_compares_scores_alone(episode):
    """Scores 0.2 and 0: no distance is known."""
    group = [episode(["a"], [0.2], success=False), episode(["a"], [0.0], sample=1)]

    assert_weights(CREDITS["graphgpo"]()(group), [[0.707107], [-0.707107]], atol=1e-5)


def test_g2po(walk):
    """Gamma 1: V is 3/4 at a, 1/2 at b, 1 at c. Next: 1/2 1, 1/2 0, 3/4 1 1; at a their mean is 11/16.

    Changes: -1/4 1/2, -1/4 -1/2, 0 1/4 0 with mean -1/28.
    """
    mean = -1 / 28
    expected = [
        [1 / 3 - 3 / 16 - 1 / 4 - mean, 1 / 3 + 1 / 2 + 1 / 2 - mean],
        [-2 / 3 - 3 / 16 - 1 / 4 - mean, -2 / 3 - 1 / 2 - 1 / 2 - mean],
        [1 / 3 + 1 / 16 - mean, 1 / 3 + 5 / 16 + 1 / 4 - mean, 1 / 3 - mean],
    ]

    assert_weights(CREDITS["g2po"](gamma=1.0)(walk), expected)


def test_pgpo(walk):
    """Potentials 3/4, 1/2, 1; changes -1/4 1/2, -1/4 -1/2, 0 1/4 0; two of three solved: (1/3)^2 = 1/9."""
    assert_weights(
        CREDITS["pgpo"](normalize="mean")(walk),
        [
            [1 / 4 - 3 / 16 / 9, 1 / 2 + 1 / 2 / 9],
            [-3 / 4 - 3 / 16 / 9, -1 / 2 - 1 / 2 / 9],
            [1 / 4 + 1 / 16 / 9, 1 / 4 + 5 / 16 / 9, 0.0],
        ],
    )


def test_pgpo_counts_the_reward_of_a_turn_itself(episode):
    """From s, 0.8 at once and 0.5 later: changes 0.8 + 0 - 0.65 and 0 + 0.5 - 0.65, as the returns less their mean."""
    group = [
        episode(["s", "a"], [0.8, 0.0], success=False),
        episode(["s", "b"], [0.0, 0.5], success=False, sample=1),
    ]

    assert_weights(CREDITS["pgpo"](normalize="mean")(group), [[0.3, 0.0], [-0.3, 0.0]])


def test_turn_gae(episode):
    """Gamma 1/2, lambda 1/2: delta_1 = 1 - 1/2, delta_0 = 1/2 1/2 - 1/4 = 0, A_0 = 1/4 1/2."""
    group = [episode([None] * 2, [0.0, 1.0])]

    assert_weights(CREDITS["turn-gae"](gamma=0.5, lam=0.5)(group, values=[[0.25, 0.5]]), [[0.125, 0.5]])


def test_turn_gae_reads_the_first_token_of_a_turn_and_no_reward_is_a_boundary(episode):
    """A turn with reward 0 is a turn, and so is a last one."""
    group = [episode([None] * 3, [0.0, 0.0, 0.0])]

    assert_weights(
        CREDITS["turn-gae"]()(group, values=[[[0.5, 9.0], [0.25], [1.0, 9.0]]]), [[-0.5, -0.25, -1.0]]
    )


def test_bi_level_gae_discounts_rewards_from_turn_to_turn():
    """The discount inside a turn is none of the objective."""
    credit = CREDITS["bi-level-gae"](gamma=0.9, high_level_gamma=0.95)

    assert credit.traits.discount == 0.95


def test_bi_level_gae(episode):
    """Lambda 0: turns 1 - 1/2 = 1/2 and 0 + 1/2 - 1/4 = 1/4, so that turn 0 returns 1/2.

    Its tokens: 0 + 1/4 - 1/2 and 1/2 - 1/4. With lambda 1 they are 1 - 1/2 and 1 - 1/4.
    """
    values = [[0.5, 0.25], [0.5]]
    levels = {"gamma": 1.0, "high_level_gamma": 1.0}

    assert bi_level_advantages([0.0, 1.0], values, lam=0.0, **levels) == [[-0.25, 0.25], [0.5]]
    assert bi_level_advantages([0.0, 1.0], values, lam=1.0, **levels) == [[0.5, 0.75], [0.5]]
    assert_weights(
        CREDITS["bi-level-gae"](lam=0.0)([episode([None] * 2, [0.0, 1.0])], values=[values]), [[-0.25, 0.5]]
    )


def test_hiper(episode):
    """Segments of turns 0 and 1, and of 2 and 3; gamma 1/2, lambda 1/2, that of segments 1/4.

    Turn 3: 4 - 1 = 3. Turn 2: 0 + 4/2 - 2 = 0. Turn 1: 1 + 2/2 - 1 = 1. Turn 0: 0 + 1/2 + (2 + 0/4)/4 - 1 = 0.
    With V = 1 at turn 2 in place of 2: 0 + 2 - 1 = 1; 1 + 1/2 - 1 = 1/2; 0 + 1/2 + (1 + 1/4)/4 - 1 = -3/16.
    """
    turns = [
        Turn(({"role": "user", "content": said},), Action("go")) for said in ("at a", "ok", "at b", "ok")
    ]
    rewards = (0.0, 1.0, 0.0, 4.0)
    one = episode([None] * 4, list(rewards))
    told = replace(one, turns=tuple(replace(t, reward=r) for t, r in zip(turns, rewards, strict=True)))
    credit = CREDITS["hiper"](switch="^at", gamma=0.5, lam=0.5, high_level_lam=0.25)

    assert_weights(credit([told], values=[[1.0, 1.0, 2.0, 1.0]]), [[0.0, 1.0, 0.0, 3.0]])
    assert_weights(credit([told], values=[[1.0, 1.0, 1.0, 1.0]]), [[-3 / 16, 0.5, 1.0, 3.0]])
    within = CREDITS["hiper"](switch="^at", gamma=1.0, lam=0.5)([told], values=[[0.0, 0.0, 0.0, 1.0]])
    assert_weights(within, [[5.0, 1.0, 4.0, 3.0]])
    assert CREDITS["hiper"]()([replace(one, turns=())], values=[[]])[0].tolist() == []


def test_a_switch_that_is_no_expression_or_of_no_text_is_refused():
    with pytest.raises(ValueError, match=r"switch must be a regular expression, got '\('"):
        CREDITS["hiper"](switch="(")
    with pytest.raises(ValueError, match="by must be one of reply, action"):
        CREDITS["hiper"](by="thought")


def test_generalized_advantages():
    """Gamma 1/2, lambda 1: returns less values."""
    assert generalized_advantages([0.0, 4.0], [1.0, 2.0], 0.5, 1.0) == [1.0, 2.0]


@pytest.mark.parametrize("name", ["turn-gae", "bi-level-gae", "hiper"])
@pytest.mark.parametrize(
    ("values", "message"),
    [(None, "needs values="), ([[0.0]], "one entry for each turn"), ([[[], []]], "at least one token")],
)
def test_missing_or_short_values_are_refused(episode, name, values, message):
    with pytest.raises(ValueError, match=message):
        CREDITS[name]()([episode([None] * 2, [0.0, 1.0])], values=values)
