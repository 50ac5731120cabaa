"""Turn-level GAE where a limit cut an episode: V of its last turn stands for the missing rest."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit_check.processes import PROCESSES

LOOP = PROCESSES[0]
GAE = CREDITS["turn-gae"]
NUMBER = st.integers(-8, 8).map(lambda n: n / 4)


def cut(trajectory):
    """The trajectory, stopped at a limit."""
    return dataclasses.replace(trajectory, truncated=True)


def test_hand_worked(episode):
    """Gamma 1/2, lambda 1/2. Cut: delta_1 = 1 + 1/2 1/2 - 1/2 = 3/4, delta_0 = 1/2 1/2 - 1/4 = 0, A_0 = 1/4 3/4."""
    group = [cut(episode([None] * 2, [0.0, 1.0])), episode([None] * 2, [0.0, 1.0], sample=1)]
    values = [[0.25, 0.5]] * 2

    going_on, ended = GAE(gamma=0.5, lam=0.5, truncated="bootstrap")(group, values=values)
    both_end = GAE(gamma=0.5, lam=0.5)(group, values=values)

    assert going_on.tolist() == [0.1875, 0.75]
    assert ended.tolist() == [0.125, 0.5]
    assert [one.tolist() for one in both_end] == [[0.125, 0.5]] * 2


@given(rows=st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=6), gamma=st.sampled_from([0.5, 1.0]))
def test_it_is_an_episode_with_a_last_reward_of_what_is_to_come(rows, gamma):
    """An independent way, whatever lambda: gamma V of the last turn, paid with its reward, and then the end."""
    from support.states import episode as _episode

    rewards, values = ([*each] for each in zip(*rows, strict=True))
    paid = [*rewards[:-1], rewards[-1] + gamma * values[-1]]
    for lam in (0.0, 0.5, 1.0):
        (found,) = GAE(gamma=gamma, lam=lam, truncated="bootstrap")(
            [cut(_episode([None] * len(rows), rewards))], values=[values]
        )
        (expected,) = GAE(gamma=gamma, lam=lam)([_episode([None] * len(rows), paid)], values=[values])
        if any(paid):  # rewards of 0 alone would be read as a total at the end
            assert_close(found, expected, rtol=0, atol=1e-12)


def gradient(credit, value):
    """Expected sum of A grad log pi over the turns of an episode, with V the same in the one state."""
    episodes = LOOP.episodes
    found = torch.zeros(episodes.parameters, dtype=torch.float64)
    for i, chance in enumerate(episodes.probability):
        one = episodes.trajectory(i, 0)
        (weights,) = credit([one], values=[[value] * len(one.turns)])
        found += chance * (weights[:, None] * episodes.score[i, : len(weights)]).sum(0)
    return found


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_the_turns_of_a_window_learn_what_the_whole_process_would_teach_them(lam):
    """Loop, cut behind three turns, but worth what it is without an end: V = p(finish) / 2 + p(stay) V.

    Q(finish) = 1/2, Q(stay) = V, Q(give up) = 0; turn t is reached with p(stay)^t. By `end`, staying is rated too low.
    """
    finish, stay, _ = LOOP.policy(0)
    value = finish / 2 / (1 - stay)
    chances = torch.tensor(LOOP.policy(0), dtype=torch.float64)
    worth = torch.tensor([0.5, value, 0.0], dtype=torch.float64)
    expected = (1 + stay + stay**2) * chances * (worth - chances @ worth)

    assert_close(gradient(GAE(lam=lam, truncated="bootstrap"), value), expected, rtol=0, atol=1e-12)
    assert (gradient(GAE(lam=lam), value) - expected).abs().max() > 1e-3


def test_v_is_not_learned_from_what_was_cut(episode):
    """Its return is not known; where a limit ends an episode it is, and so it is of one that FAILED."""
    group = [cut(episode([None] * 2, [0.0, 1.0])), episode([None], [0.5], sample=1)]

    unknown, known = GAE(truncated="bootstrap").value_targets(group, [[1, 1], [1]])

    assert all(each != each for (each,) in unknown)
    assert known == [[0.5]]
    assert GAE().value_targets(group, [[1, 1], [1]]) == [[[1.0], [1.0]], [[0.5]]]


def test_it_claims_nothing_and_takes_no_third_way(episode):
    """An episode without turns that was cut has no weights."""
    assert not GAE(truncated="bootstrap").traits.unbiased
    assert GAE(truncated="bootstrap")([cut(episode([], []))], values=[[]])[0].shape == (0,)
    with pytest.raises(ValueError, match="truncated must be one of end, bootstrap"):
        GAE(truncated="drop")
