"""The tree of an explored episode: its nodes, where it is played on from, and the pairs of its steps."""

import random
from collections import Counter
from math import log, sqrt

from hypothesis import given
from hypothesis import strategies as st

from perturn.data.tree import grow, next_node
from perturn.methods.mcts_dpo.tree_pairs import IN_TREE, pair_within_trees
from perturn.types import Action, Status, Task, Trajectory, Turn


def episode(did, reward=0.0, sample=0, taken_over=0, **changes):
    """One whose actions are the letters of a text."""
    turns = tuple(
        Turn(({"role": "user", "content": str(t)},), Action(letter)) for t, letter in enumerate(did)
    )
    origin = 0 if sample else None
    shown = {"origin": origin, "sample": sample, "taken_over": taken_over, "total_reward": reward} | changes
    return Trajectory(Task("t"), turns, **shown)


def said(trajectory):
    return "".join(turn.action.text for turn in trajectory.turns)


def test_hand_worked_tree():
    """ab, then ac and d: two went through a, with a mean of 0.5; two actions were drawn at the root, two after a."""
    root = grow(episode("ab", 1.0), [episode("d", 0.25, 2), episode("ac", 0.0, 1, taken_over=1)])

    (after_a, after_d) = root.children.values()
    assert [len(node.passed) for node in root.walk()] == [3, 2, 1, 1, 1]
    assert (root.drawn, after_a.drawn, after_d.drawn) == (2, 2, 0)
    assert (after_a.value, after_d.value) == (0.5, 0.25)
    assert after_a.depth == 1
    assert said(after_a.example) == "ab"
    assert after_d.example is None


def test_equal_calls_with_other_ids_are_one_node():
    calls = [({"id": name, "function": {"name": "look", "arguments": {}}},) for name in ("call_a", "call_b")]
    played = [Trajectory(Task("t"), (Turn((), Action("", tool_calls=each)),)) for each in calls]

    assert len(grow(played[0], played[1:]).children) == 1


def test_a_branch_that_failed_on_the_way_to_its_state_says_nothing():
    """The world crashed when the first of two turns was given again: a is worth 1 as before, not 0.5."""
    crashed = episode("a", 0.0, 1, taken_over=2, status=Status.FAILED, error="RuntimeError: crashed")

    (after_a,) = grow(episode("abc", 1.0), [crashed]).children.values()

    assert after_a.value == 1.0
    assert pair_within_trees([episode("abc", 0.4)], [crashed, episode("x", 0.3, 2)], 0.0)[1]["kept"] == 1


def test_long_episodes_make_deep_trees():
    """Deeper than Python nests calls; each node comes before its children, and these in the order they were tried."""
    played = [episode("b" * 3000, 0.0, 1), episode("ab", 0.0, 2, taken_over=1)]
    root = grow(episode("a" * 3000, 1.0), played)

    depths = [node.depth for node in root.walk()]

    assert depths == [0, *range(1, 3001), 2, *range(1, 3001)]
    assert next_node(root, width=2, exploration=1.0).depth == 2  # two actions were drawn after a


def test_calls_of_tools_tell_actions_apart():
    one, other = ([{"function": {"name": name}}] for name in ("ls", "cd"))
    turns = [Turn((), Action("", tool_calls=tuple(calls))) for calls in (one, other, one)]
    episodes = [Trajectory(Task("t"), (turn,), sample=n) for n, turn in enumerate(turns)]

    assert [len(node.passed) for node in grow(episodes[0], episodes[1:]).children.values()] == [2, 1]


def test_a_node_is_left_when_so_many_actions_were_drawn():
    played = [episode("bx", 0.0, 1)]
    assert next_node(grow(episode("ax", 1.0), played), width=3, exploration=0.0).depth == 0
    played.append(episode("cx", 0.0, 2))

    node = next_node(grow(episode("ax", 1.0), played), width=3, exploration=0.0)

    assert said(node.example)[: node.depth] == "a"


def test_what_was_tried_little_is_followed_if_it_counts_for_more():
    """a: mean 0.6 of 3; b: 0.4 of 1. The bonuses are sqrt(ln 4 / 3) = 0.680 and sqrt(ln 4) = 1.177 times c."""
    played = [
        episode("byq", 0.4, 1),
        *(episode(did, 0.6, n, taken_over=1) for n, did in ((2, "ayq"), (3, "azq"))),
    ]
    root = grow(episode("axq", 0.6), played)
    turns_at = 0.2 / (sqrt(log(4)) - sqrt(log(4) / 3))

    for exploration, followed in [(turns_at * 0.99, "a"), (turns_at * 1.01, "b")]:
        node = next_node(root, width=2, exploration=exploration)
        assert said(node.example)[:1] == followed


def test_ends_and_what_failed_are_not_played_on():
    """After a, b all ended; after c only an episode that FAILED went on."""
    lost = {"status": Status.FAILED, "error": "Crash: lost"}
    done = [episode("b", 0.0, 1), episode("cxx", 0.0, 2, **lost)]

    assert next_node(grow(episode("a"), done), width=3, exploration=1.0) is None
    assert next_node(grow(episode("a"), done), width=4, exploration=1.0).depth == 0
    assert next_node(grow(episode("cxx", **lost), []), width=3, exploration=1.0) is None


def test_a_branch_whose_children_are_all_tried_is_left_for_another():
    """The best is a, and there is nothing left below it."""
    played = [episode("ay", 1.0, 1, taken_over=1), episode("bx", 0.0, 2)]

    node = next_node(grow(episode("ax", 1.0), played), width=2, exploration=0.0)

    assert said(node.example)[: node.depth] == "b"


@given(seed=st.integers(0, 10_000), width=st.integers(2, 3), simulations=st.integers(0, 30))
def test_trees_grow_as_they_say(seed, width, simulations):
    """No node has more actions drawn than the width, and each episode draws one at every node from its own on.

    A tree with nothing left to try has drawn as many everywhere.
    """
    chance = random.Random(seed)

    def play(begun):
        did = begun + "".join(chance.choice("ab") for _ in range(3 - len(begun)))
        return did, float(did.count("a") > 1)

    first = play("")
    explored, played = episode(*first), []
    for number in range(simulations):
        node = next_node(grow(explored, played), width, 1.0)
        if node is None:
            assert all(each.drawn == width for each in grow(explored, played).walk() if each.depth < 3)
            break
        assert node.drawn < width
        did, reward = play(said(node.example)[: node.depth])
        played.append(episode(did, reward, 1 + number, taken_over=node.depth))
    root = grow(explored, played)
    assert all(node.drawn <= width for node in root.walk())
    assert sum(node.drawn for node in root.walk()) == sum(3 - one.taken_over for one in (explored, *played))
    for node in root.walk():  # each by itself, from the episodes
        begins = [
            one for one in (explored, *played) if said(one).startswith(said(node.passed[0])[: node.depth])
        ]
        assert node.passed == begins


def test_search_finds_the_rare_success():
    """One of 256 ways of eight turns succeeds, and each right turn earns a little.

    Search gets there every second time; of 32 episodes that are drawn afresh, one does so with a chance of 0.12.
    """
    chance = random.Random(0)

    def play(begun):
        did = begun + "".join(chance.choice("ab") for _ in range(8 - len(begun)))
        return did, (len(did) - len(did.lstrip("a"))) / 8

    searched = afresh = 0
    for _ in range(100):
        explored, played = episode(*play("")), []
        for number in range(31):
            node = next_node(grow(explored, played), 4, 0.1)
            if node is None:
                break
            did, reward = play(said(node.example)[: node.depth])
            played.append(episode(did, reward, 1 + number, taken_over=node.depth))
        searched += max(one.total_reward for one in (explored, *played)) == 1.0
        afresh += max(play("")[1] for _ in range(32)) == 1.0
    assert searched > 40
    assert afresh < 25


def test_hand_worked_pairs():
    """At the root a is worth 0.75 and d 0: kept. After a: b 1 and c 0.5 lie within the threshold, but for 0.4."""
    played = [episode("ac", 0.5, 1, taken_over=1), episode("dx", 0.0, 2)]

    pairs, counts = pair_within_trees([episode("abe", 1.0, terminated=True, success=True)], played, 0.5)

    (pair,) = pairs
    assert (said(pair.chosen), said(pair.rejected)) == ("a", "d")
    assert (pair.chosen.total_reward, pair.rejected.total_reward) == (0.75, 0.0)
    assert (pair.chosen.terminated, pair.chosen.truncated, pair.chosen.success) == (False, True, False)
    assert counts == {"tie": 0, "gap": 1, "kept": 1}
    again, _ = pair_within_trees([episode("abe", 1.0)], played, 0.4)
    assert [(said(each.chosen), said(each.rejected)) for each in again] == [("a", "d"), ("ab", "ac")]


def test_equal_steps_make_no_pair_and_what_failed_is_in_none():
    lost = episode("c", 0.0, 2, status=Status.FAILED)

    pairs, counts = pair_within_trees([episode("ax", 0.0)], [episode("by", 0.0, 1), lost], 0.0)

    assert not pairs
    assert counts == Counter(tie=1, gap=0, kept=0)
    assert set(counts) == set(IN_TREE)
    assert pair_within_trees([episode("ax", 1.0)], [lost], 0.0)[1].total() == 0


def test_the_order_in_which_episodes_are_stored_changes_nothing():
    played = [episode("ac", 0.5, 1, taken_over=1), episode("dx", 0.0, 2), episode("dy", 0.9, 3, taken_over=1)]

    assert pair_within_trees([episode("ab", 1.0)], played) == pair_within_trees(
        [episode("ab", 1.0)], played[::-1]
    )
