"""The simulated loop: moments worked by hand, and what must be true of all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.estimate.episode_lengths import Episodes
from perturn.estimate.loop_simulator import Loop, episode_turns, simulate
from perturn.estimate.overlap import predict
from support.benchmarks import benchmark


def fixed(random):
    """One turn of ten seconds."""
    return [(4.0, 6.0)]


def test_hand_worked_moments():
    """Two slots, four episodes of 10 s: an exploration takes 20 s, a training 15 s.

    Taking turns: 3 * 35 = 105. With staleness 1 iteration 2 is explored from 20 to 40 and is trained from 40 (policy 1
    is there at 35); iteration 3 from 40 to 60, trained to 75. Nothing is gained by a staleness of 2.
    """
    seconds = [simulate(Loop(3, 4, 2, 15.0, staleness), fixed).seconds for staleness in (0, 1, 2)]

    assert seconds == [105.0, 75.0, 75.0]


def test_training_that_takes_longer_waits_for_nothing():
    """20 s of play and three trainings of 30 s; the episodes of iteration 3 begin with policy 1, at 50."""
    found = simulate(Loop(3, 4, 2, 30.0, 1), fixed)

    assert found.seconds == 110.0
    assert found.waiting == pytest.approx(20 / 110)
    assert found.idle == pytest.approx(1 - 120 / 220)


def test_slots_that_the_tail_frees_are_taken():
    """Three episodes in two slots: 20 s by themselves, one slot free for 10; two iterations end at 30 + 1."""
    assert simulate(Loop(2, 3, 2, 1.0, 1), fixed).seconds == 31.0
    assert simulate(Loop(2, 3, 2, 1.0, 0), fixed).seconds == 42.0


def test_turns_of_an_episode():
    """A start of 1 s and three turns of 2 + 3 s."""
    draw = episode_turns(lambda _: 3, lambda _: 2.0, lambda _: 3.0, start=1.0)

    assert draw(None) == ((0.0, 1.0), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0))


def test_answers_wait_for_a_replica():
    """Four episodes of one turn: 4 s for an answer and 6 s for a step, in four slots; the training takes 1 s.

    One replica that answers one at a time ends its answers at 4, 8, 12 and 16, and the last step ends at 22. Two
    replicas end theirs at 4, 4, 8 and 8, so the last step ends at 14. At two answers at once one replica does as well.
    """
    one = Loop(1, 4, 4, 1.0, at_once=1)
    found = [
        simulate(each, fixed).seconds for each in (one, replace(one, replicas=2), replace(one, at_once=2))
    ]

    assert found == [23.0, 15.0, 15.0]
    assert simulate(replace(one, at_once=None), fixed).seconds == 11.0


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 100))
def test_more_replicas_take_no_longer_where_answers_take_equally_long(replicas, at_once, seed):
    """And no less than if no answer waited."""
    draw = episode_turns(lambda random: random.randint(1, 5), lambda _: 1.0, lambda _: 0.5)
    loops = [Loop(2, 8, 8, 1.0, replicas=each, at_once=at_once) for each in (replicas, 8)]
    few, many = (simulate(loop, draw, seed).seconds for loop in loops)

    assert simulate(replace(loops[0], at_once=None), draw, seed).seconds <= many + 1e-9 <= few + 2e-9


def test_a_dry_run_marks_what_it_predicts(tmp_path):
    """An exploration of 20 s and others of 15 s an iteration, three turns each: 75 of 105 s, as above."""
    recipe = parse(Recipe, benchmark("staleness")._recipe("predicted", tmp_path, 1) | {"iterations": 3})
    recipe = replace(recipe, explore=replace(recipe.explore, concurrency=2))
    said = predict(recipe, Episodes(explore=4, turns=3.0, limit=3.0), 20.0, [15.0] * 3)
    recorded = Episodes(
        explore=4, turns=3.0, limit=9.0, turn_counts=(3, 3), answer_tokens=(7, 7), seconds=1.0
    )

    assert said.startswith(
        "Prediction: with staleness=1 the iterations take 71 % of the time above, by a simulation"
    )
    assert "71 % of the time above, by a simulation of the loop (turns as recorded;" in predict(
        recipe, recorded, 20.0, [15.0] * 3
    )


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 6),
    st.floats(0, 50),
    st.integers(0, 1000),
)
def test_more_staleness_takes_no_longer_than_taking_turns(iterations, episodes, slots, train, seed):
    """And never less than all trainings, or than all episodes in all slots."""
    draw = episode_turns(lambda random: random.randint(1, 5), lambda random: random.random(), lambda _: 0.1)
    found = [simulate(Loop(iterations, episodes, slots, train, k), draw, seed) for k in (0, 1, 2)]

    for later in found[1:]:
        assert later.seconds <= found[0].seconds + 1e-9
        assert later.seconds >= iterations * train - 1e-9
        assert -1e-9 <= later.idle <= 1
