"""Final answers of episodes are read, and those that are the same come together, whatever their order."""

from dataclasses import replace
from itertools import permutations

import pytest

from perturn.errors import ConfigError, DataError
from perturn.methods.siop.answer_clusters import OwnAnswers, clusters_of, final_answer
from perturn.methods.siop.siop_credit import AnswerClusters
from perturn.types import Action, Status, Task, Trajectory, Turn

FORM = "Thought: I know the answer.\nAction: finish[{answer}]"


def episode(text, task="q", **changes):
    """An episode whose last turn has a text."""
    turns = (Turn((), Action("Thought: hm.\nAction: search[x]")), Turn((), Action(text)))
    return Trajectory(Task(task, data={"answer": "gold"}), turns, **changes)


def finished(*answers):
    """Episodes that end with answers; None: with none."""
    return [
        episode("Action: search[y]" if each is None else f"Thought: so.\nAction: finish[{each}]", sample=i)
        for i, each in enumerate(answers)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thought: so.\nAction: finish[The Wend]", "The Wend"),
        ("Thought: so.\nAction:  Finish[ The Wend ] \n", "The Wend"),
        ("Action: finish[a [b]]", "a [b]"),
        ("Thought: Action: finish[no]\nAction: search[Wend]", None),
        ("Thought: so.\nAction: finish[]", None),
        ("Thought: so.\nAction: finish[ ]", None),
        ("Action: finish[Wend] I think", None),
        ("finish[Wend]", None),
        ("", None),
    ],
)
def test_an_answer_is_read_from_the_last_line_of_the_last_turn(text, expected):
    """As the world reads it: without regard to case and blanks around it."""
    assert final_answer(episode(text), FORM) == expected


def test_who_did_not_act_gave_no_answer():
    """A FAILED episode, one without turns, and one whose last action was invalid."""
    (one,) = finished("Wend")
    invalid = replace(one, turns=(one.turns[0], replace(one.turns[1], valid=False)))

    assert [
        final_answer(each, FORM)
        for each in (one, replace(one, status=Status.FAILED), replace(one, turns=()), invalid)
    ] == ["Wend", None, None, None]
    assert final_answer(episode("Action: 5"), "Action: {answer}") == "5"


def test_answers_are_one_once_normalized():
    """Case, punctuation, articles and blanks; the one given most often stands first, then by letter."""
    group = finished("the Wend", "Wye", "Wend!", None, "the Wend", "wend", "a")

    clusters, texts = clusters_of(group, AnswerClusters(), FORM)

    assert clusters == [0, 1, 0, -1, 0, 0, 2]
    assert texts[0] == texts[2] == ["the Wend", "Wend!", "wend"]
    assert texts[1] == ["Wye"]
    assert texts[3] == []
    assert clusters_of(group, AnswerClusters(members=1), FORM)[1][5] == ["the Wend"]


def test_an_accent_of_its_own_makes_no_other_answer():
    """Composed and decomposed they read the same, and one text stands for both."""
    clusters, texts = clusters_of(finished("Wénd", "We\u0301nd", "Wend"), AnswerClusters(), FORM)

    assert clusters == [1, 1, 0]
    assert texts == [["Wénd"], ["Wénd"], ["Wend"]]


def test_answers_of_articles_or_signs_alone_are_one_by_these():
    """Of choices from A to D, A is an article; a sign is no other sign. Letters of other scripts are letters."""
    group = finished("A", "(a)", "a.", "B", "b.", "An", "+", "-", "\u00c9t\u00e9", "\u00e9t\u00e9!")

    assert clusters_of(group, AnswerClusters(), FORM)[0] == [0, 0, 0, 4, 4, 3, 1, 2, 5, 5]


def test_no_order_changes_a_cluster_and_tasks_and_policies_are_apart():
    group = finished("the Wend", "Wend", None, "Wye")
    expected = dict(
        zip(
            [one.sample for one in group],
            zip(*clusters_of(group, AnswerClusters(), FORM), strict=True),
            strict=True,
        )
    )

    for order in permutations(group):
        found = zip(*clusters_of(order, AnswerClusters(), FORM), strict=True)
        assert dict(zip([one.sample for one in order], found, strict=True)) == expected
    other = [replace(one, task=Task("r")) for one in group] + [replace(one, policy="p") for one in group]
    clusters, texts = clusters_of([*group, *other[1:2], *other[-1:]], AnswerClusters(), FORM)
    assert texts[:4] == [each for _, each in expected.values()]
    assert (clusters[4:], texts[4:]) == ([0, 0], [["Wend"], ["Wye"]])


def test_the_gold_answer_alone_stands_for_every_episode_that_did_not_fail():
    group = [*finished("Wend", None), replace(finished("x")[0], status=Status.FAILED)]

    assert clusters_of(group, AnswerClusters(gold=True), FORM) == (
        [0, 0, -1],
        [["gold"], ["gold"], []],
    )
    with pytest.raises(DataError, match="has no gold answer"):
        clusters_of([replace(group[0], task=Task("q"))], AnswerClusters(gold=True), FORM)


def test_a_function_of_ones_own_says_which_are_the_same(tmp_path, monkeypatch):
    """It is given the task and the different answers; what it does wrong is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_same.py").write_text(
        "def first(task, answers):\n    assert task.id == 'q'\n    return [each[0].lower() for each in answers]\n"
        "def short(task, answers):\n    return [1]\n"
        "def lists(task, answers):\n    return [[] for _ in answers]\n"
        "number = 5\n"
    )
    group = finished("Wend", "wye", "Tees", "Wend")

    assert clusters_of(group, AnswerClusters("own_same:first"), FORM) == (
        [1, 1, 0, 1],
        [["Wend", "wye"], ["Wend", "wye"], ["Tees"], ["Wend", "wye"]],
    )
    for name, message in (
        ("short", r"must give a label for each of the 3 answers to task 'q', got \[\d+\]\."),
        ("lists", "TypeError"),
    ):
        with pytest.raises(ConfigError, match=message):
            clusters_of(group, AnswerClusters(same=f"own_same:{name}"), FORM)
    with pytest.raises(ConfigError, match=r"credit\.same .* must be a function, got"):
        OwnAnswers().check(AnswerClusters("own_same:number"), None)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        OwnAnswers().check(AnswerClusters("no_such_module:same"), None)
