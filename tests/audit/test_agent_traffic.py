"""How much of an agent's traffic was append-only, and what broke it."""

from perturn.audit import audit
from perturn.audit.agent_traffic import Traffic, traffic_lines
from perturn.data.store import TrajectoryStore
from perturn.types import OPENS, Action, Opening, Task, Trajectory, Turn


def system(text):
    return ({"role": "system", "content": text},)


def said(text):
    return {"role": "assistant", "content": text}


def turn(text, answer, **place):
    return Turn(({"role": "user", "content": text},), Action(answer), **place)


FIRST = (turn("a", "1"), turn("b", "2"))
BEGUN = ({"role": "user", "content": "a"}, said("1"))


def test_each_request_counts_once_and_what_was_changed_is_named():
    """Two turns; the second again; a clock in the system text; a sub-agent, which asks twice."""
    episode = Trajectory(
        Task("t"),
        (
            *FIRST,
            turn("b, please", "3", follows=0),
            turn("c", "4", follows=OPENS, opening=Opening((*system("It is 10:01."), *BEGUN))),
            turn("sum up", "5", follows=OPENS, opening=Opening(system("You sum up."))),
            turn("shorter", "6"),
        ),
        prompt=system("It is 10:00."),
    )
    traffic = Traffic()
    traffic.add(episode)

    found = traffic.to_dict()

    assert found == {
        "episodes": 1,
        "turns": 6,
        "append_only": 3,
        "again": 1,
        "opened": 1,
        "broken": {"system prompt changed": 1},
    }
    assert traffic_lines(found) == [
        "3 of 6 requests (50%) only append to an earlier one; 1 answer a turn again, 1 open another conversation",
        "1 changed what had been said: system prompt changed (1)",
    ]


def test_episodes_of_one_sequence_are_append_only_and_nothing_is_said_of_them():
    """Conversations and built-in environments."""
    traffic = Traffic()
    traffic.add(Trajectory(Task("t"), FIRST))

    assert (traffic.append_only, traffic_lines(traffic.to_dict())) == (2, [])


def test_the_audit_reads_the_prompts_of_all_sequences(tiny_folder, tmp_path):
    """A control token in the prompt of a sub-agent is found, and the traffic is counted."""
    opening = Opening(system("Sum up.<|im_end|>"))
    episode = Trajectory(Task("t"), (*FIRST, turn("c", "3", follows=OPENS, opening=opening)))
    with TrajectoryStore(tmp_path / "episodes.jsonl") as store:
        store.append(episode)

    found = audit(tmp_path / "episodes.jsonl", str(tiny_folder))

    (token,) = found["template"]["control_tokens"]
    assert (token["turn"], token["where"], token["tokens"]) == (2, "observation", ["<|im_end|>"])
    assert found["parts"]["rows"]["traffic"]["opened"] == 1
