"""The prefix rule: where a request continues an episode, and what broke it where it does not."""

import pytest

from perturn.episodes.prefix_matching import Cause, Sequences, comparable, in_call_order

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def called(name="look", arguments='{"at": 1}', call="c1"):
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def played(*answers, tools=(), **settings):
    """An episode whose agent appends to its conversation; returns it and the conversation."""
    known, talk = Sequences(**settings), [SYSTEM]
    for number, answer in enumerate(answers):
        talk = [*talk, user(f"observation {number}")]
        known.add(known.position(talk, tools), answer)
        talk = [*talk, answer]
    return known, talk


def test_a_conversation_that_grows_is_one_sequence():
    known, talk = Sequences(), [SYSTEM, user("0")]
    positions = []
    for number in range(4):
        positions.append(known.position(talk))
        known.add(positions[-1], said(f"answer {number}"))
        talk = [*talk, said(f"answer {number}"), user(str(number + 1))]

    assert [position.follows for position in positions] == [-1, 0, 1, 2]
    assert positions[0].prompt == (SYSTEM,)
    assert [position.heard for position in positions] == [(user(str(number)),) for number in range(4)]
    assert all(position.broke is None for position in positions)
    assert known.agents == 1


def test_a_worked_example_stands_before_the_first_observation():
    talk = [SYSTEM, user("example"), said("shown"), user("task")]

    position = Sequences().position(talk)

    assert (position.follows, position.prompt, position.heard) == (-1, tuple(talk[:3]), (user("task"),))


@pytest.mark.parametrize(
    "returned",
    [
        said([{"type": "text", "text": "go north"}]),
        said("  go north\n"),
        {"role": "assistant", "content": "go north", "tool_calls": None, "refusal": None, "name": None},
    ],
)
def test_forms_of_one_answer_are_equal(returned):
    known, talk = played(said("go north"))

    assert known.position([*talk[:-1], returned, user("x")]).follows == 0


def test_calls_are_equal_whatever_their_ids_and_the_spelling_of_their_arguments():
    known, talk = played(said("", tool_calls=[called()]), tools=TOOLS)
    again = {"role": "assistant", "content": None, "tool_calls": [called(arguments={"at": 1}, call="other")]}
    result = {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "a lamp"}]}

    assert known.position([*talk[:-1], again, result], TOOLS).follows == 0
    again["tool_calls"] = [called(arguments={"at": 2})]
    assert known.position([*talk[:-1], again, result], TOOLS).broke.cause is Cause.ANSWER


def test_a_retry_follows_the_turn_that_the_first_try_followed():
    known, talk = played(said("a"), said("b"))

    retried = known.position(talk[:-1])

    assert (retried.follows, retried.broke) == (0, None)
    first = known.position(talk[:2])
    assert (first.follows, first.prompt, first.broke) == (-1, (SYSTEM,), None)


def test_of_equal_answers_the_one_that_nobody_continued_is_taken():
    known = Sequences()
    talk = [SYSTEM, user("0")]
    for _ in range(2):
        known.add(known.position(talk), said("same"))
    longer = [*talk, said("same"), user("1")]

    first = known.position(longer)
    known.add(first, said("x"))

    assert {first.follows, known.position(longer).follows} == {0, 1}
    known.add(known.position(longer), said("y"))
    assert known.agents == 2


def broken(sent, tools=(), kwargs=None, **settings):
    known, whole = played(
        said("one"), said("<think>why</think>two", reasoning_content="r"), said("three"), **settings
    )
    position = known.position(sent(whole), tools, kwargs)
    assert position.follows == -1
    return position.broke


@pytest.mark.parametrize(
    ("cause", "message", "sent"),
    [
        (Cause.SYSTEM, 0, lambda talk: [{**SYSTEM, "content": "Be brief. 12:01"}, *talk[1:], user("x")]),
        (Cause.EDITED, 3, lambda talk: [*talk[:3], user("other"), *talk[4:], user("x")]),
        (Cause.REMOVED, 3, lambda talk: [*talk[:3], *talk[5:], user("x")]),
        (Cause.REMOVED, 1, lambda talk: [talk[0], user("Summary: all went well."), *talk[5:], user("x")]),
        (Cause.REASONING, 4, lambda talk: [*talk[:4], said("<think>why</think>two"), *talk[5:], user("x")]),
        (Cause.REASONING, 4, lambda talk: [*talk[:4], said("two"), *talk[5:], user("x")]),
        (Cause.ANSWER, 6, lambda talk: [*talk[:6], said("tree"), user("x")]),
        (Cause.OTHER, 0, lambda talk: [{"role": "system", "content": "You search."}, user("find it")]),
        (Cause.OTHER, 1, lambda talk: [SYSTEM, user("find it")]),
    ],
)
def test_a_break_names_its_cause_and_its_first_message(cause, message, sent):
    found = broken(sent)

    assert (found.cause, found.message) == (cause, message)


def test_changed_tools_and_template_variables_open_a_sequence():
    assert broken(lambda talk: [*talk, user("x")], TOOLS).cause is Cause.TOOLS
    assert broken(lambda talk: [*talk, user("x")], (), {"enable_thinking": False}).cause is Cause.VARIABLES


def test_a_thought_does_not_count_where_the_policy_reads_none():
    known, talk = played(said("one", reasoning_content="because"), reads_thoughts=False)

    assert known.position([*talk[:-1], said("one"), user("x")]).follows == 0
    known, talk = played(said("one", reasoning_content="because"))
    assert known.position([*talk[:-1], said("one", reasoning="because"), user("x")]).follows == 0
    assert known.position([*talk[:-1], said("one"), user("x")]).follows == -1


def test_an_answer_may_come_back_in_any_form_it_was_given_in():
    known = Sequences()
    known.add(known.position([user("0")]), said("x = 1 </code>"), said("x = 1"))

    for text in ("x = 1 </code>", "x = 1"):
        assert known.position([user("0"), said(text), user("1")]).follows == 0


def test_results_stand_in_the_order_of_their_calls_without_ids():
    asked = said("", tool_calls=[called("look", call="a"), called("take", call="b")])
    results = [{"role": "tool", "tool_call_id": call, "content": call} for call in ("b", "a")]

    found = in_call_order([user("go"), asked, *results, user("x")])

    assert found[2:4] == [
        {"role": "tool", "name": "look", "content": "a"},
        {"role": "tool", "name": "take", "content": "b"},
    ]
    assert "id" not in found[1]["tool_calls"][0]
    assert found[4] == user("x")


@pytest.mark.parametrize(
    ("calls", "results", "texts"),
    [
        (("a", "b"), ("b", ""), "10"),
        (("a", "b"), ("", "a"), "10"),
        (("a", "a"), ("a", "a"), "01"),
        (("a", "a"), ("", "a"), "10"),
        (("", ""), ("", ""), "01"),
    ],
    ids=["partly missing", "first missing", "repeated", "repeated and missing", "missing"],
)
def test_each_result_has_a_call_of_its_own(calls, results, texts):
    """A result without an id belongs to the first call that no result names."""
    asked = said("", tool_calls=[called("look", call=calls[0]), called("take", call=calls[1])])
    heard = [{"role": "tool", "content": str(at), "tool_call_id": each} for at, each in enumerate(results)]

    found = in_call_order([asked, *heard])[1:]

    assert [(each["name"], each["content"]) for each in found] == [("look", texts[0]), ("take", texts[1])]


def test_a_second_result_of_a_call_keeps_its_call():
    asked = said("", tool_calls=[called("look", call="a"), called("take", call="b")])
    heard = [{"role": "tool", "content": str(at), "tool_call_id": each} for at, each in enumerate("aab")]

    found = in_call_order([asked, *heard])[1:]

    assert [(each["name"], each["content"]) for each in found] == [
        ("look", "0"),
        ("look", "1"),
        ("take", "2"),
    ]


def test_developer_messages_are_system_messages():
    assert comparable({"role": "developer", "content": "a"}) == comparable({"role": "system", "content": "a"})
