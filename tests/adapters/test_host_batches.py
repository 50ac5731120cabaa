"""What all adapters share: turns from masks, rewards of turns, and which credits a host can feed."""

from dataclasses import replace

import pytest
import torch

from perturn.adapters.host_batches import (
    HostBatch,
    HostEpisode,
    turn_rewards,
    turn_spans,
    weigh_batch,
    weigh_episodes,
)
from perturn.adapters.host_credits import STATES, host_credit, read_aspects
from perturn.adapters.verl import Estimator
from perturn.credit import CREDITS
from perturn.credit.returns import Return
from perturn.credit.rloo import RLOO
from perturn.errors import ConfigError, DataError
from support.host_batches import random_batch


def test_turns_are_the_runs_of_ones():
    assert turn_spans([0, 1, 1, 0, 0, 1]) == [(1, 3), (5, 6)]
    assert turn_spans([0, 0]) == [(0, 0)]


def test_the_rewards_of_turns_sum_to_those_of_tokens():
    spans = turn_spans([0, 1, 1, 0, 1, 0, 0])
    assert turn_rewards([1.0, 0, 2, 4, 8, 16, 0], spans) == [7.0, 24.0]


def test_what_a_turn_earned_is_moved_from_the_last_turn():
    made = HostEpisode("g", [0.0, 0.0, 1.0], earned=[0.25, 0.0, 0.5]).trajectory(0)
    assert [turn.reward for turn in made.turns] == [0.25, 0.0, 0.75]
    assert made.total_reward == 1.0


@pytest.mark.parametrize("wrong", [{"states": ["a"]}, {"earned": [1.0, 2.0, 3.0]}])
def test_states_and_rewards_are_one_a_turn(wrong):
    with pytest.raises(DataError, match="for each of the 2 turns"):
        HostEpisode("g", [0.0, 1.0], **wrong).trajectory(0)


@pytest.mark.parametrize("name", ["gigpo", "anchor-rloo", "hgpo", "rloo", "grpo"])
def test_numbers_are_those_of_the_credit_called_directly(name):
    for seed in range(20):
        batch = random_batch(seed)
        credit = host_credit("host", name, {STATES: None})
        found, _ = weigh_batch(
            HostBatch(batch.mask, batch.rewards, batch.groups, states=batch.states), credit
        )
        for group in set(batch.groups):
            rows = [row for row, own in enumerate(batch.groups) if own == group]
            spans = [turn_spans(batch.mask[row].tolist()) for row in rows]
            members = [
                HostEpisode(
                    group, turn_rewards(batch.rewards[row].tolist(), own), batch.states[row]
                ).trajectory(at)
                for at, (row, own) in enumerate(zip(rows, spans, strict=True))
            ]
            for row, own, weights in zip(rows, spans, credit.credit(members), strict=True):
                expected = torch.zeros(40).double()
                for (start, end), weight in zip(own, weights, strict=True):
                    expected[start:end] = weight
                torch.testing.assert_close(found[row], expected, atol=0, rtol=0)


def test_sequences_of_one_episode_are_weighed_as_one():
    mask = torch.tensor([[1.0, 0, 1], [1, 0, 0], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 1, 0]])
    credit = host_credit("host", {"name": "rloo"}, {})
    found, returns = weigh_batch(HostBatch(mask, rewards, ["g", "g", "g"], episodes=["a", "a", "b"]), credit)
    assert found.tolist() == [[1, 0, 1], [1, 0, 0], [-1, -1, 0]]
    assert returns.tolist() == found.tolist()


def test_sequences_of_an_episode_may_come_in_any_order():
    """Given the positions, a shuffled batch gets the weights of the batch in the order of play."""
    mask = torch.tensor([[1.0, 0, 1], [1, 0, 0], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 1, 0]])
    states = [["a", "b"], ["c"], ["a"]]
    credit = host_credit("host", {"name": "gigpo", "gamma": 0.5}, {STATES: None})
    ordered = HostBatch(mask, rewards, ["g"] * 3, ["x", "x", "y"], states)
    other = [2, 1, 0]
    mixed = HostBatch(
        mask[other],
        rewards[other],
        ["g"] * 3,
        ["y", "x", "x"],
        [states[row] for row in other],
        positions=[0, 10, 9],
    )

    found = [weigh_batch(batch, credit)[0] for batch in (ordered, mixed)]

    torch.testing.assert_close(found[1], found[0][other])


def test_what_was_recorded_for_a_masked_sequence_is_not_read():
    """Hosts mask sequences that were cut: the score counts in the group, and no turn has their states."""
    mask, rewards = torch.tensor([[0.0, 0, 0], [1, 0, 1]]), torch.tensor([[0.0, 0, 1], [0, 0, 0]])
    credit = host_credit("host", {"name": "gigpo"}, {STATES: None})
    batch = HostBatch(
        mask, rewards, ["g", "g"], states=[["a", "b", "a"], ["a", "b"]], earned=[[1.0, 0, 0], None]
    )

    found, _ = weigh_batch(batch, credit)

    assert not found[0].any()
    assert (
        found[1, 0] == found[1, 2] < 0
    )  # alone with its states, so that only the episode's advantage is there


def test_a_state_after_the_last_turn_of_a_sequence_is_ignored():
    """Agent loops may record the state after the last turn, and the reward of a turn that was cut off."""
    mask, rewards = torch.tensor([[1.0, 0, 1], [1, 0, 1]]), torch.tensor([[0.0, 0, 1], [0, 0, 0]])
    credit = host_credit("host", {"name": "gigpo"}, {STATES: None})
    exact = HostBatch(mask, rewards, ["g", "g"], states=[["a", "b"]] * 2, earned=[[0.5, 0.25]] * 2)
    surplus = replace(exact, states=[["a", "b", "c"]] * 2, earned=[[0.5, 0.125, 0.125]] * 2)

    assert torch.equal(*(weigh_batch(batch, credit)[0] for batch in (exact, surplus)))


def test_only_the_last_sequence_of_an_episode_may_have_a_surplus():
    """A surplus in an earlier sequence would shift the states of the later sequence."""
    mask, rewards = torch.tensor([[1.0, 0, 1], [1, 0, 0]]), torch.zeros(2, 3)
    credit = host_credit("host", {"name": "gigpo"}, {STATES: None})
    batch = HostBatch(mask, rewards, ["g", "g"], ["x", "x"], [["a", "b"], ["c", "d"]], [[0.5, 0], [0.25, 0]])

    assert weigh_batch(batch, credit)
    for wrong in ({"states": [["a", "b", "z"], ["c"]]}, {"earned": [[0.5, 0, 0], [0.25]]}):
        with pytest.raises(DataError, match="for each of the 3 turns"):
            weigh_batch(replace(batch, **wrong), credit)


def test_the_estimator_of_verl_orders_outputs_and_leaves_padding_out():
    """Verl sorts sequences by length, repeats a session's score in each output, and copies fields to its padding."""
    pad = f"pad{'0' * 32}"
    mask = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 0, 0]])
    rewards = torch.tensor([[0.0, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]])
    beside = {
        "episodes": ["u_0", f"{pad}_0", "u_0", "u_1"],
        "positions": [1, 0, 0, 0],
        "states": [["c"], ["a", "b"], ["a", "b"], ["a"]],
        "earned": [None] * 4,
        "values": None,
    }
    credit = host_credit("verl", {"name": "gigpo", "gamma": 0.9}, {STATES: None})

    found, returns = Estimator(credit, beside)(rewards, mask, ["u", pad, "u", "u"])

    group = [HostEpisode("u", [0, 0, 1.0], ["a", "b", "c"]), HostEpisode("u", [0.0], ["a"])]
    first, second = credit.credit([one.trajectory(at) for at, one in enumerate(group)])
    expected = [[first[2], first[2], 0], [0, 0, 0], [first[0], 0, first[1]], [second[0], 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected).float())
    assert torch.equal(returns, found)


def test_values_are_read_at_the_first_token_of_a_turn_and_give_the_critics_target():
    mask, rewards = torch.tensor([[1.0, 1, 0, 1]]), torch.tensor([[0.0, 0, 0, 1]])
    values = torch.tensor([[0.25, 9.0, 9.0, 0.5]])
    credit = host_credit("host", "turn-gae", {"values": None})
    found, returns = weigh_batch(HostBatch(mask, rewards, ["g"], values=values), credit)
    assert found.tolist() == [[0.75, 0.75, 0, 0.5]]
    assert returns.tolist() == [[1, 1, 0, 1]]


def test_a_credit_that_a_host_cannot_feed_is_rejected_in_one_line():
    with pytest.raises(ConfigError, match=r"^credit 'gigpo' needs state keys, .*; pass keys\.$"):
        host_credit("host", "gigpo", {STATES: "pass keys"})
    with pytest.raises(ConfigError, match=r"^credit 'turn-gae' needs values, .*; set a critic\.$"):
        host_credit("host", "turn-gae", {"values": "set a critic"})
    with pytest.raises(
        ConfigError, match="'igpo' needs answer, which host does not provide; run it in Perturn"
    ):
        host_credit("host", "igpo", {})
    with pytest.raises(ConfigError, match="'arpo' needs branches of episodes"):
        host_credit("host", "arpo", {})
    with pytest.raises(ConfigError, match="'RLOO' needs validity of actions, which host does not provide"):
        host_credit("host", RLOO(returns=Return(invalid_penalty=0.1)), {})


def test_a_credit_of_states_rejects_episodes_without_any():
    credit = host_credit("host", "gigpo", {STATES: None})
    with pytest.raises(DataError, match=r"1 of 2 episodes of host have none, .* before the first turn"):
        weigh_episodes([HostEpisode("g", [1.0], ["a"]), HostEpisode("g", [0.0])], credit)


def test_what_entries_read_is_found_by_asking_them():
    reads = {
        name: read_aspects(CREDITS[name]())
        for name in ("rloo", "grpo", "reinforce++", "maxrl", "trloo", "uniform")
    }
    assert set(map(frozenset, reads.values())) == {frozenset()}
    states = ("gigpo", "hgpo", "anchor-rloo", "pgpo")
    assert all(read_aspects(CREDITS[name]()) == {STATES} for name in states)
    both = {STATES, "validity of actions"}
    assert read_aspects(CREDITS["graphgpo"]()) == read_aspects(CREDITS["g2po"]()) == both
    assert read_aspects(CREDITS["hiper"](switch="^[0-9]", by="action")) == {"texts"}


class Reader(RLOO):
    """RLOO times a number from each turn."""

    number = staticmethod(lambda turn: 1)

    def __call__(self, group, **needed):
        """Return RLOO's weights times the numbers."""
        return [
            own * torch.tensor([float(self.number(turn)) for turn in one.turns])
            for own, one in zip(super().__call__(group, **needed), group, strict=True)
        ]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (lambda turn: "sorry" in turn.action.text, "needs texts"),
        (lambda turn: len(turn.action.token_ids), "needs tokens of actions"),
        (lambda turn: turn.action.ended, "needs tokens of actions"),
        (lambda turn: len(turn.user_said), "needs texts"),
        (lambda turn: len(repr(turn.action)), "needs texts"),
        (lambda turn: len(turn.observation[-1]["content"]), "needs texts"),
        (lambda turn: int(turn.observation_text), "needs texts"),
        (lambda turn: 1 / 0, "cannot weigh a group of three episodes: ZeroDivisionError"),
    ],
)
def test_a_credit_that_reads_what_no_host_provides_is_rejected(monkeypatch, number, said):
    monkeypatch.setattr(Reader, "number", staticmethod(number))
    with pytest.raises(ConfigError, match=said):
        host_credit("host", Reader(), {STATES: None})


@pytest.mark.parametrize(
    "number",
    [
        lambda turn: replace(turn).reward,
        lambda turn: turn == replace(turn),
        lambda turn: hash(turn.action) is None,
        lambda turn: repr(turn) == "",
    ],
)
def test_a_credit_may_copy_and_compare_turns(monkeypatch, number):
    monkeypatch.setattr(Reader, "number", staticmethod(number))
    assert host_credit("host", Reader(), {})


class LateIsBad(RLOO):
    """Total reward minus a penalty for truncation, over the mean of the group."""

    def __call__(self, group, **_):
        """Return the advantages."""
        scores = torch.tensor([one.total_reward - one.truncated for one in group])
        each = zip(scores - scores.mean(), group, strict=True)
        return [torch.full((len(one.turns),), float(advantage)) for advantage, one in each]


def test_truncation_is_found_with_a_group_baseline():
    with pytest.raises(ConfigError, match="needs truncation of episodes"):
        host_credit("host", LateIsBad(), {})


def test_truncation_is_read_by_bootstrapping_alone():
    given = {"values": None}
    assert host_credit("host", {"name": "turn-gae"}, given)
    assert host_credit("host", {"name": "hiper"}, given)
    for section in (
        {"name": "turn-gae", "truncated": "bootstrap"},
        {"name": "hiper", "switch": "^You arrive"},
    ):
        with pytest.raises(ConfigError, match=r"needs (truncation of episodes|texts), which host does not"):
            host_credit("host", section, given)
