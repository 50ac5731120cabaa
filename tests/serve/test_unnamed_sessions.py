"""Sessions of requests without a name: equal conversations of several agents, and the limit of open sessions."""

import time

import pytest

from perturn.serve import Endpoint, ServeSettings
from perturn.types import Task
from support.endpoint_calls import ASKED, ask, post, recorded
from support.scripted import Scripted


def said(*answers):
    """A conversation in which the policy gave these answers."""
    turns = (
        [{"role": "assistant", "content": each}, {"role": "user", "content": "And?"}] for each in answers
    )
    return [*ASKED, *(message for turn in turns for message in turn)]


def test_unnamed_agents_with_the_same_first_answer_keep_their_sessions(endpoint):
    opened = {ask(endpoint).headers["x-perturn-session"] for _ in range(2)}
    continued = [ask(endpoint, messages=said("ok")).headers["x-perturn-session"] for _ in range(2)]

    assert len(opened) == 2
    assert set(continued) == opened
    assert [endpoint.summary(name)["turns"] for name in continued] == [2, 2]


def test_a_conversation_of_claude_code_is_one_session(endpoint):
    """Its first system block differs in each request. A router may join the blocks."""
    names, messages = set(), list(ASKED)
    for cch in ("fa690", "36ee5", "0aaa9", "fa690"):
        header = f"x-anthropic-billing-header: cc_version=2.1.37.{cch[:3]}; cc_entrypoint=cli; cch={cch};"
        system = [{"type": "text", "text": text} for text in (header, "You are Claude Code; be brief.")]
        body = {"model": "p", "max_tokens": 5, "system": system, "messages": messages}
        if cch == "0aaa9":
            body["system"] = f"{header}\nYou are Claude Code; be brief."
        found = post(endpoint, "/v1/messages", body)
        names.add(found.headers["x-perturn-session"])
        answer = {"role": "assistant", "content": found.json()["content"]}
        messages += [answer, {"role": "user", "content": "And?"}]

    (name,) = names
    episode = endpoint.trajectory(name)
    routed = ask(endpoint, messages=[{"role": "system", "content": body["system"]}, *messages])
    assert routed.headers["x-perturn-session"] == name
    assert [turn.follows for turn in episode.turns] == [None] * 4
    assert episode.prompt == ({"role": "system", "content": "You are Claude Code; be brief."},)


def block(kind, text):
    return {"type": kind, "text": text, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize(
    ("path", "key", "kind"),
    [("/v1/chat/completions", "messages", "text"), ("/v1/responses", "input", "input_text")],
)
def test_the_billing_line_is_dropped_in_all_messages_of_the_system(
    endpoint, path, key, kind, role, is_joined
):
    """A router makes a message of each block, or one message of them all."""
    names, said = set(), ASKED
    for cch in ("fa690", "36ee5"):
        header = f"x-anthropic-billing-header: cc_version=2.1.37; cch={cch};"
        parts = [block(kind, text) for text in (header, "Be brief.")]
        system = [parts] if is_joined else [[each] for each in parts]
        system = [{"role": "system", "content": "Hi."}, *({"role": role, "content": each} for each in system)]
        found = post(endpoint, path, {"model": "p", key: [*system, *said]})
        names.add(found.headers["x-perturn-session"])
        said = [*ASKED, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]

    (name,) = names
    assert [each["content"] for each in endpoint.trajectory(name).prompt] == ["Hi.", "Be brief."]


def test_at_the_limit_the_longest_idle_unnamed_session_is_cut(tmp_path):
    """Named sessions stay: with one of them and one unnamed session open, only the unnamed session is cut."""
    with Endpoint(Scripted(), ServeSettings(max_sessions=2), record=tmp_path) as endpoint:
        assert ask(endpoint, "/s/named/v1/chat/completions").status_code == 200
        found = [ask(endpoint) for _ in range(3)]
        assert ask(endpoint, "/s/other/v1/chat/completions").status_code == 200
        refused = ask(endpoint)
        open_now = endpoint.counts()["open"]

    assert [each.status_code for each in found] == [200] * 3
    assert (refused.status_code, open_now) == (429, 2)
    cut = [each.task.id for each in recorded(tmp_path) if each.truncated]
    assert sorted(cut) == sorted(each.headers["x-perturn-session"] for each in found)


def test_without_a_record_each_session_of_a_name_has_a_seed_of_its_own(endpoint, engine):
    for _ in range(2):
        ask(endpoint, "/s/again/v1/chat/completions")
        post(endpoint, "/s/again/reward", {"reward": 0.0})
    kept = [endpoint.new_session(Task("again"), 0, 7) for _ in range(2)]

    assert len({prompt.seed for prompt in engine.asked}) == 2
    assert len(set(kept)) == 2  # callers of this process choose their samples


def test_a_session_that_is_not_continued_is_preferred_although_it_answers(endpoint):
    first, second = (ask(endpoint).headers["x-perturn-session"] for _ in range(2))
    continued = ask(endpoint, messages=said("ok")).headers["x-perturn-session"]
    (other,) = {first, second} - {continued}
    endpoint._sessions.known(other).in_flight += 1
    again = ask(endpoint, messages=said("ok")).headers["x-perturn-session"]
    endpoint._sessions.known(other).in_flight -= 1

    assert again == other


def test_a_rejected_session_cuts_no_other(tmp_path):
    taken = {"task": "t", "sample": 0}
    with Endpoint(Scripted(), ServeSettings(max_sessions=1), record=tmp_path) as endpoint:
        post(endpoint, "/s/a", taken, "PUT")
        post(endpoint, "/s/a/reward", {"reward": 1.0})
        name = ask(endpoint).headers["x-perturn-session"]
        refused = post(endpoint, "/s/b", taken, "PUT")
        turns = endpoint.summary(name)["turns"]

    assert (refused.status_code, turns) == (409, 1)


def test_sessions_that_cannot_be_recorded_count_as_open(tmp_path, monkeypatch):
    """The third session cuts the first, which stays open; then no other is opened until one has ended."""
    with Endpoint(Scripted(), ServeSettings(max_sessions=2), record=tmp_path) as endpoint:
        with monkeypatch.context() as broken:
            broken.setattr(endpoint._record, "ended", lambda trajectory: 1 / 0)
            found = [ask(endpoint) for _ in range(3)]
            until = time.monotonic() + 30
            while endpoint.counts()["open"] < 3 and time.monotonic() < until:
                time.sleep(0.01)
            refused = ask(endpoint)
        open_now = endpoint.counts()["open"]

    assert [each.status_code for each in found] == [200] * 3
    assert (refused.status_code, open_now) == (429, 3)
