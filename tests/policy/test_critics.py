"""Critics: what they learn from one turn to the next is the truth where features allow it, and they go on."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit_check.processes import PROCESSES, Step
from perturn.errors import RunError
from perturn.methods.archer.critics import (
    Rows,
    TurnCritics,
    before,
    begin,
    behind,
    bootstrap,
    judge,
    learn,
    learn_and_judge,
)
from perturn.quantities import Ground
from perturn.run.stages.quantity_source import read_state, write_state

ArCHer = CREDITS["archer"]


def one_hot(process):
    """All episodes of a process; a feature for each state at each turn, and for each action there."""
    episodes = process.episodes
    seen = [(step.state, t, step.action) for steps in episodes.steps for t, step in enumerate(steps)]
    states, actions = sorted({key[:2] for key in seen}), sorted(set(seen))

    def table(keys, known):
        return torch.tensor([[float(key == each) for each in known] for key in keys])

    rows = Rows(
        [
            table([(step.state, t, step.action) for t, step in enumerate(steps)], actions)
            for steps in episodes.steps
        ],
        [table([(step.state, t) for t, step in enumerate(steps)], states) for steps in episodes.steps],
        [[step.reward for step in steps] for steps in episodes.steps],
    )
    return rows, torch.stack([episodes.probability] * 2)


def drawn(seed=0, episodes=12, features=3):
    """Episodes of one to four turns with features and rewards at random."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + i % 4 for i in range(episodes)]
    behind, before = (
        [torch.randn(length, features, generator=generator) for length in lengths] for _ in range(2)
    )
    rewards = [torch.randn(length, generator=generator).double().tolist() for length in lengths]
    return Rows(behind, before, rewards)


def exact_critics(episodes, gamma):
    """What the process knows of Q and V."""
    return TurnCritics().exact(ArCHer(gamma=gamma).needs[0], Ground(episodes, gamma, episodes))


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_critics_with_a_feature_for_each_state_come_to_the_true_values(process, gamma):
    """Each episode counts as likely as it is. By closed form: what the process knows of Q and V."""
    rows, chances = one_hot(process)
    exact = exact_critics(process.episodes, gamma)

    learned = learn(begin(rows), rows, chances, ArCHer(gamma=gamma, rounds=400, penalty=1e-9))

    for found, known in zip(judge(learned, rows), exact, strict=True):
        for k in range(2):
            assert found.q[k] == pytest.approx(known.q[0], abs=1e-5)
            assert found.v[k] == pytest.approx(known.v[0], abs=1e-5)


def test_true_values_hold_by_hand():
    """Loop, gamma 1: V = 0 behind the third turn; Q(finish) = 1/2 at each; Q(stay) = V of the next turn."""
    episodes = PROCESSES[0].episodes

    finish, stay, leave = (episodes.action_value(Step(0, action, 0.0), 2, 1.0) for action in range(3))
    chance = PROCESSES[0].policy(0)

    assert (finish, stay, leave) == (0.5, 0.0, 0.0)
    assert episodes.action_value(Step(0, 1, 0.0), 1, 1.0) == pytest.approx(chance[0] / 2)


def test_what_is_kept_is_not_learned_again():
    """A pull so strong that an iteration goes a small part of the way; many of them come to the true values."""
    rows, chances = one_hot(PROCESSES[3])
    (known, *_), way = exact_critics(PROCESSES[3].episodes, 0.9), ArCHer(rounds=50, penalty=0.05)
    critics, misses = begin(rows), []

    for _ in range(400):
        critics = learn(critics, rows, chances, way)
        misses.append(abs(judge(critics, rows)[0].v[0][0] - known.v[0][0]))

    assert misses[0] > 0.05
    assert misses[-1] < 1e-3
    assert int(critics.iterations) == 400


def plain(critics, k, rows, counts, way):
    """Three rounds as regressions on rows, with one row more for each feature that is pulled."""
    x, z = torch.cat(behind(critics, rows)), torch.cat(before(critics, rows))
    ends = [i for i in range(len(rows.rewards)) for _ in rows.rewards[i]]
    share = torch.tensor([float(counts[i]) for i in ends], dtype=torch.float64)
    root = (share / share.sum()).sqrt()[:, None]
    rewards = torch.tensor([each for own in rows.rewards for each in own], dtype=torch.float64)
    last = torch.tensor([a != b for a, b in zip(ends, [*ends[1:], -1], strict=True)])

    def fit(table, aim, pulled_to):
        size = len(pulled_to) - 1
        pull = (way.penalty * size) ** 0.5 * torch.eye(size, size + 1, dtype=torch.float64)
        left = torch.cat([root * table, pull])
        right = torch.cat([root[:, 0] * aim, pull @ pulled_to])
        return torch.linalg.lstsq(left, right[:, None]).solution[:, 0]

    q, v, slow_q, slow_v = (each[k] for each in (critics.q, critics.v, critics.slow_q, critics.slow_v))
    for _ in range(way.rounds):
        following = torch.cat([(z @ slow_v)[1:], torch.zeros(1, dtype=torch.float64)])
        aim = rewards + way.gamma * torch.where(last, 0.0, following)
        q, v = fit(x, aim, critics.q[k]), fit(z, x @ slow_q, critics.v[k])
        slow_q = (1 - way.tau) * slow_q + way.tau * q
        slow_v = (1 - way.tau) * slow_v + way.tau * v
    return q, v, slow_q, slow_v


def test_rounds_are_the_regressions_that_they_say():
    """In a second iteration, so that heads, copies and pulls are all at work."""
    rows, way = drawn(), ArCHer(rounds=3, tau=0.3, penalty=0.2)
    first = learn(begin(rows), rows, bootstrap(12, 0), way)
    other, counts = drawn(seed=1), bootstrap(12, 5)

    found = learn(first, other, counts, way)

    for k in range(2):
        expected = plain(first, k, other, counts[k], way)
        for ours, theirs in zip((found.q, found.v, found.slow_q, found.slow_v), expected, strict=True):
            assert_close(ours[k], theirs, atol=1e-9, rtol=1e-9)


@settings(derandomize=True)
@given(seed=st.integers(0, 1000), gamma=st.floats(0, 1), tau=st.floats(0.01, 1), penalty=st.floats(1e-3, 10))
def test_rounds_never_run_away(seed, gamma, tau, penalty):
    """Regression shortens, and what follows a turn is never more than all turns: rewards of 0 bring all heads to rest.

    In the mean square over the rows that are learned from, V and Q of 0 rewards never grow.
    """
    rows = drawn(seed)
    counts = torch.ones(2, 12, dtype=torch.float64)
    way = ArCHer(gamma=gamma, tau=tau, penalty=penalty, rounds=200)
    taught = learn(begin(rows), rows, counts, way)
    zero = replace(rows, rewards=[[0.0] * len(own) for own in rows.rewards])

    found = learn(replace(taught, q=0 * taught.q, v=0 * taught.v), zero, counts, way)

    def size(critics):
        one = max(float((torch.cat(behind(critics, rows)) @ critics.slow_q[0]).square().mean()), 0.0)
        return max(one, float((torch.cat(before(critics, rows)) @ critics.slow_v[0]).square().mean()))

    assert size(found) <= size(taught) + 1e-9


def test_a_feature_that_was_constant_yet_may_move_later():
    """It is standardized by the deviation of all of them together, and says nothing before."""
    rows = drawn()
    still = replace(rows, before=[own * torch.tensor([1.0, 1.0, 0.0]) for own in rows.before])

    critics = begin(still)

    together = torch.cat(list(still.before)).double().var(0, correction=0).mean().sqrt()
    assert float(critics.scale_v[2]) == pytest.approx(1 / float(together))
    assert all(torch.isfinite(getattr(critics, each.name)).all() for each in fields(critics))
    flat = Rows([torch.ones(2, 3)], [torch.ones(2, 3)], [[0.0, 1.0]])
    (only,) = learn_and_judge(None, flat, [[0.9, 1.0]], ArCHer(), 0).critiques
    assert only.q[0] == pytest.approx([only.q[0][0]] * 2)


def test_critics_differ_by_the_episodes_that_they_learn_from():
    """As many draws as episodes; another seed draws others, the same seed the same."""
    counts = bootstrap(50, 3)

    assert counts.sum(1).tolist() == [50.0, 50.0]
    assert not torch.equal(counts[0], counts[1])
    assert torch.equal(counts, bootstrap(50, 3))
    assert not torch.equal(counts, bootstrap(50, 4))
    assert bootstrap(1, 0).tolist() == [[1.0], [1.0]]


def test_what_v_explains_and_the_td_error_are_of_episodes_that_were_not_learned_from():
    """By the definition, critic by critic; one episode alone is always learned from, and then neither is known."""
    rows, way = drawn(), ArCHer(rounds=20)
    returns = [[float(len(own) - t) for t in range(len(own))] for own in rows.rewards]

    found = learn_and_judge(None, rows, returns, way, 7)

    critics, counts = found.critics, bootstrap(12, 7)
    value, aim, errors = [], [], []
    for k in range(2):
        for i in range(12):
            if counts[k, i] == 0:
                own, z = found.critiques[i], before(critics, rows)[i]
                value += own.v[k]
                aim += returns[i]
                after = [*(z @ critics.slow_v[k]).tolist()[1:], 0.0]
                errors += [r + 0.9 * a - q for r, a, q in zip(rows.rewards[i], after, own.q[k], strict=True)]
    value, aim, errors = (torch.tensor(each, dtype=torch.float64) for each in (value, aim, errors))
    share = 1 - (aim - value).var(correction=0) / aim.var(correction=0)
    assert found.explained_variance == pytest.approx(float(share))
    assert found.td_error == pytest.approx(float(errors.square().mean().sqrt()))
    alone = Rows(rows.behind[:1], rows.before[:1], rows.rewards[:1])
    single = learn_and_judge(None, alone, returns[:1], way, 7)
    assert (single.explained_variance, single.td_error) == (None, None)


def test_the_smaller_of_two_critics_overrates_the_chosen_action_less():
    """A bandit whose four actions are worth nothing, each tried eight times: the best by one critic is worth 0.4 to it.

    That is the mean over 200 draws of what the critics say of the action that they rate highest; a policy climbs to it.
    """
    generator = torch.Generator().manual_seed(0)
    actions = [i % 4 for i in range(32)]
    chosen = []
    for seed in range(200):
        noise = torch.randn(32, 1, generator=generator).double().tolist()
        rows = Rows([torch.eye(4)[a : a + 1] for a in actions], [torch.ones(1, 1)] * 32, noise)
        critics = learn(begin(rows), rows, bootstrap(32, seed), ArCHer(rounds=1, tau=1.0, penalty=1e-6))
        q = torch.tensor([each.q for each in judge(critics, rows)[:4]])[..., 0].T  # [critics, actions]
        chosen.append([float(q[0].max()), float(q.amin(0).max())])

    one, least = (sum(each) / len(each) for each in zip(*chosen, strict=True))

    assert one > 0.4
    assert 0 < least < 0.7 * one


def test_critics_are_read_as_they_were_written(tmp_path):
    """Every number to the bit; what is not there, or no critics, says so."""
    critics = learn_and_judge(
        None, drawn(), [[0.0] * len(own) for own in drawn().rewards], ArCHer(), 0
    ).critics
    file = tmp_path / "credits" / "critics-001.safetensors"

    write_state(file, {each.name: getattr(critics, each.name) for each in fields(critics)})
    found = read_state(file, "critics")

    for name, each in found.items():
        assert torch.equal(each, getattr(critics, name))
        assert each.dtype == getattr(critics, name).dtype
    with pytest.raises(RunError, match=r"critics-002\.safetensors, the critics .* is not there; restore"):
        read_state(tmp_path / "credits" / "critics-002.safetensors", "critics")
    file.write_bytes(b"no")
    with pytest.raises(RunError, match="holds no critics"):
        read_state(file, "critics")
