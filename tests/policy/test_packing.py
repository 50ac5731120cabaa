from dataclasses import replace
from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.errors import DataError
from perturn.policy import packing
from perturn.policy.packing import by_budget, count_tokens, lay_out


def sequence(ids, loss=None):
    """`loss` maps a position to its turn; None: the last token is turn 0."""
    loss = {len(ids) - 1: 0} if loss is None else loss
    return Encoded(
        tuple(ids), tuple(loss.get(place, NO_TURN) for place in range(len(ids))), ("user",) * len(ids)
    )


def trimmed(encoded):
    """What a pack has to hold: nothing is predicted from the last token that carries loss."""
    last = max(place for place, turn in enumerate(encoded.turn) if turn != NO_TURN)
    return replace(encoded, ids=encoded.ids[:last], turn=encoded.turn[:last])


@pytest.fixture
def worth(monkeypatch):
    """Set from how many saved tokens on a beginning is shared."""
    return lambda tokens: monkeypatch.setattr(packing, "WORTH_SHARING", tokens)


def listed(batch, *names):
    return [batch[name].tolist() for name in names]


def test_a_pair_forks_where_its_sides_differ(worth):
    """Inputs 1 2 3 4 and 1 2 3 6: three shared tokens, and one of each side.

    The third token predicts 4 and 6, the two ends predict 5 and 7: four predictions in order of place.
    """
    worth(0)
    batch = lay_out([sequence([1, 2, 3, 4, 5], {3: 0, 4: 1}), sequence([1, 2, 3, 6, 7], {3: 0, 4: 0})])

    assert listed(batch, "ids", "position") == [[1, 2, 3, 4, 6], [0, 1, 2, 3, 3]]
    assert batch["segments"].tolist() == [[0, 3, 5], [3, 4, 4], [4, 5, 5]]
    assert listed(batch, "predictor", "target") == [[2, 2, 3, 4], [4, 6, 5, 7]]
    assert listed(batch, "prediction", "turn", "trajectory") == [[0, 2, 1, 3], [0, 1, 0, 0], [0, 0, 1, 1]]


def test_a_group_that_forks_twice_is_laid_out_depth_first(worth):
    """Inputs 1 2 3 4, 1 2 3 5 and 1 2 6: the second fork lies between the first and its other branch."""
    worth(0)
    batch = lay_out([sequence(ids) for ids in ([1, 2, 6, 9], [1, 2, 3, 4, 9], [1, 2, 3, 5, 9])])

    assert listed(batch, "ids", "position") == [[1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 2]]
    assert batch["segments"].tolist() == [[0, 2, 6], [2, 3, 5], [3, 4, 4], [4, 5, 5], [5, 6, 6]]
    assert listed(batch, "predictor", "prediction", "trajectory") == [[3, 4, 5], [2, 0, 1], [0, 1, 2]]


def test_a_sequence_that_begins_another_ends_inside_it(worth):
    """Inputs 1 2 and 1 2 3: nothing is laid out for the first one, and one call attends for both."""
    worth(0)
    batch = lay_out([sequence([1, 2, 3, 4]), sequence([1, 2, 8])])

    assert batch["ids"].tolist() == [1, 2, 3]
    assert batch["segments"].tolist() == [[0, 3, 3]]
    assert listed(batch, "predictor", "target", "trajectory") == [[1, 2], [8, 4], [0, 1]]
    assert batch["prediction"].tolist() == [1, 0]


def test_identical_sequences_are_computed_once():
    """Short as they are: a copy that needs no call of its own is always worth sharing.

    Three times the same two predictions.
    """
    batch = lay_out([sequence([1, 2, 3], {1: 0, 2: 0})] * 3)

    assert batch["ids"].tolist() == [1, 2]
    assert batch["segments"].tolist() == [[0, 2, 2]]
    assert listed(batch, "predictor", "target") == [[0, 1], [2, 3]]
    assert batch["prediction"].tolist() == [0, 1] * 3
    assert batch["trajectory"].tolist() == [0, 0, 1, 1, 2, 2]


def test_sequences_with_nothing_in_common_are_trees_of_their_own(worth):
    """Ordered by their first token; 2 at the second place is no common beginning."""
    worth(0)
    batch = lay_out([sequence([5, 2, 1]), sequence([1, 2, 1])])

    assert batch["ids"].tolist() == [1, 2, 5, 2]
    assert batch["segments"].tolist() == [[0, 2, 2], [2, 4, 4]]
    assert batch["predictor"][batch["prediction"]].tolist() == [3, 1]


def test_a_short_beginning_is_repeated_and_a_longer_one_behind_it_is_shared(worth):
    """All begin with 1, which saves 1 token: less than 3. Two go on with 2 3 4, which saves 4: no less."""
    worth(3)
    batch = lay_out([sequence(ids) for ids in ([1, 2, 3, 4, 5, 0], [1, 7, 0], [1, 2, 3, 4, 6, 0])])

    assert batch["ids"].tolist() == [1, 2, 3, 4, 5, 6, 1, 7]
    assert batch["position"].tolist() == [0, 1, 2, 3, 4, 4, 0, 1]
    assert batch["segments"].tolist() == [[0, 4, 6], [4, 5, 5], [5, 6, 6], [6, 8, 8]]


@pytest.mark.parametrize(("sides", "tokens"), [(2, 2 * 3), (3, 2 + 3)])
def test_what_is_saved_counts_every_copy(worth, sides, tokens):
    """A beginning of 2 tokens saves 2 between two sequences and 4 among three; 4 are asked for."""
    worth(4)
    batch = lay_out([sequence([1, 2, 3 + side, 0]) for side in range(sides)])

    assert len(batch["ids"]) == tokens


@pytest.mark.parametrize(("common", "tokens"), [(32, 32 + 2), (31, 2 * 32)])
def test_a_common_beginning_of_32_tokens_is_worth_sharing(common, tokens):
    """The number in the source: an attention call costs about as much as 32 tokens."""
    batch = lay_out([sequence([*range(common), 100 + side, 0]) for side in range(2)])

    assert len(batch["ids"]) == tokens


def test_nothing_is_shared_if_so_asked():
    """One segment a sequence, in the order given; not even identical sequences are one."""
    batch = lay_out([sequence([*range(40), end, 0]) for end in (7, 7, 8)], share=False)

    assert batch["segments"].tolist() == [[0, 41, 41], [41, 82, 82], [82, 123, 123]]
    assert batch["position"].tolist() == [*range(41)] * 3
    assert batch["predictor"].tolist() == [40, 81, 122]
    assert batch["trajectory"].tolist() == [0, 1, 2]


def test_tokens_after_the_last_loss_are_left_out():
    """The last loss token itself is predicted but predicts nothing."""
    batch = lay_out([sequence([1, 2, 3, 4, 5], {2: 0})])

    assert listed(batch, "ids", "predictor", "target") == [[1, 2], [1], [3]]


@st.composite
def sequences(draw):
    """Few words and short sequences, so that many begin alike; any places after the first carry loss."""
    ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9))
    places = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
    return sequence(ids, {place: place // 3 for place in places})


packs = st.lists(sequences(), min_size=1, max_size=7)


def path(batch, place):
    """Places that a token sees: those before it whose segment it descends from, by the definition of reach."""
    spans = batch["segments"].tolist()
    return [t for start, end, reach in spans for t in range(start, end) if t <= place < reach]


@given(packs, st.sampled_from([0, 1, 3, 32]), st.booleans())
def test_every_loss_token_sees_the_tokens_before_it_in_its_sequence(rows, least, share):
    """Following the segments from the place that predicts it reads the sequence back, ids and positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", least)
        batch = lay_out(rows, share=share)
    expected = [(i, at) for i, row in enumerate(rows) for at, turn in enumerate(row.turn) if turn != NO_TURN]

    assert batch["trajectory"].tolist() == [i for i, _ in expected]
    assert batch["turn"].tolist() == [rows[i].turn[at] for i, at in expected]
    for prediction, (i, at) in zip(batch["prediction"].tolist(), expected, strict=True):
        seen = path(batch, int(batch["predictor"][prediction]))
        assert batch["ids"][seen].tolist() == list(rows[i].ids[:at])
        assert batch["position"][seen].tolist() == list(range(at))
        assert int(batch["target"][prediction]) == rows[i].ids[at]


@given(packs, st.sampled_from([0, 1, 3, 32]), st.booleans())
def test_segments_are_nested_without_gaps(rows, least, share):
    """Each begins where the one before ends, and reaches no further than the one it descends from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", least)
        batch = lay_out(rows, share=share)
    segments = batch["segments"].tolist()

    assert [segments[0][0], segments[-1][1]] == [0, len(batch["ids"])]
    assert all(before[1] == after[0] for before, after in pairwise(segments))
    assert all(start < end <= reach <= len(batch["ids"]) for start, end, reach in segments)
    for i, (_, _, outer) in enumerate(segments):
        assert all(reach <= outer for start, _, reach in segments[i:] if start < outer)


@given(packs)
def test_a_pack_holds_each_distinct_beginning_once(rows):
    """With all beginnings shared there is one token for each distinct nonempty beginning of an input.

    `count_tokens` counts the same; before trimming it counts no fewer.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", 0)
        tokens = len(lay_out(rows)["ids"])
    inputs = [trimmed(row) for row in rows]

    assert tokens == len({row.ids[:end] for row in inputs for end in range(1, len(row.ids) + 1)})
    assert tokens == count_tokens(inputs)
    assert tokens <= count_tokens(rows)


@given(packs, st.sampled_from([1, 3, 32]))
def test_each_prediction_is_listed_once(rows, least):
    """Places and targets are distinct pairs, and all of them are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", least)
        batch = lay_out(rows)
    pairs = list(zip(*listed(batch, "predictor", "target"), strict=True))

    assert len(set(pairs)) == len(pairs)
    assert set(batch["prediction"].tolist()) == set(range(len(pairs)))


def test_a_trajectory_without_loss_is_refused():
    """There is nothing to learn from it."""
    with pytest.raises(DataError, match=r"a trajectory carries no loss; it needs at least one action"):
        lay_out([sequence([1, 2]), sequence([1, 2], {})])


def test_loss_on_the_first_token_is_refused():
    """Nothing precedes it that could predict it."""
    with pytest.raises(DataError, match=r"loss on its first token, which nothing predicts; give it a prompt"):
        lay_out([sequence([1, 2, 3], {0: 0, 2: 1})])


def joined(rows):
    """One trajectory of several sequences."""
    ids, turn = (tuple(chain.from_iterable(getattr(row, name) for row in rows)) for name in ("ids", "turn"))
    lengths = [len(row.ids) for row in rows]
    return Encoded(ids, turn, ("user",) * len(ids), starts=tuple(accumulate(lengths[:-1], initial=0)))


@given(packs, st.booleans())
def test_the_sequences_of_a_trajectory_are_laid_out_as_those_of_many(rows, share):
    """Only whose they are is another; what carries no loss is left out."""
    silent = sequence([0, 1], {})
    one, many = lay_out([joined([*rows, silent])], share=share), lay_out(rows, share=share)

    assert set(one["trajectory"].tolist()) == {0}
    assert all(one[name].equal(many[name]) for name in many.keys() - {"trajectory"})
    assert count_tokens([joined(rows)]) == count_tokens(rows)


groups_of_sequences = st.lists(
    st.lists(st.lists(sequences(), min_size=1, max_size=3).map(joined), min_size=1, max_size=2), max_size=7
)


@given(groups_of_sequences, st.integers(1, 40))
def test_packs_hold_every_group_once_and_keep_the_budget(groups, budget):
    """A pack over the budget is one group alone."""
    found = by_budget(groups, budget)

    assert sorted(index for pack in found for index in pack) == list(range(len(groups)))
    for pack in found:
        assert len(pack) == 1 or count_tokens([row for index in pack for row in groups[index]]) <= budget


def test_groups_that_begin_alike_share_a_pack():
    """Two tasks in turn, each with a prompt of 6 tokens: 6 + 1 + 1 tokens fit, another prompt does not."""
    groups = [[sequence([task] * 6 + [10 + i])] for i, task in enumerate((3, 4, 3, 4))]

    assert by_budget(groups, 8) == [[0, 2], [1, 3]]
    assert by_budget(groups, 7) == [[0], [2], [1], [3]]


@pytest.mark.parametrize(("budget", "packs"), [(16, [[0, 1]]), (15, [[0], [1]]), (1, [[0], [1]])])
def test_the_budget_is_counted_after_sharing(budget, packs):
    """Two pairs, each of 5 shared tokens and 3 + 0 of their own: 8 a pair, where 13 are laid end to end."""
    groups = [
        [sequence([word] * 5), sequence([word] * 5 + [7, 8, 9])] for word in (1, 2)
    ]  # the shorter side begins the longer one

    assert by_budget(groups, budget) == packs


def test_the_tokens_of_a_pack_are_counted_by_hand():
    """1 2 3, then 4 of 1 2 4, then 5 6 of 5 6, and nothing of the second 5 6."""
    rows = [sequence(ids) for ids in ([5, 6], [1, 2, 4], [5, 6], [1, 2, 3])]

    assert count_tokens(rows) == 3 + 1 + 2 + 0
