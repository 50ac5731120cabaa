"""The stamp of a score, and the line it is printed as."""

import pytest

from perturn.analysis.number_text import protocol_line
from perturn.run.stages.evaluate_stage import _departures
from perturn.types import EpisodeProtocol, Sampling

STAMP = {
    "name": "alfworld-gigpo-react",
    "environment": "alfworld-0.4.2",
    "split": "unseen",
    "n": 134,
    "panel_sha256": "0123456789abcdef" * 4,
    "max_turns": {"heat": 50, "cool": 50},
    "history": 2,
    "list_admissible": True,
    "decoding": {"temperature": 0.4, "top_p": 1.0, "max_new_tokens": 512},
    "departures": {},
    "seed": 3,
}
LINE = (
    "alfworld-gigpo-react on alfworld-0.4.2; split unseen, n = 134, task list 0123456789ab; at most 50 turns; "
    "history of 2 turns; admissible actions listed; temperature 0.4, top-p 1.0, at most 512 tokens per turn; seed 3"
)
GREEDY = {
    "decoding": {"temperature": 0, "max_new_tokens": 9},
    "max_turns": {"a": 9, "b": 12},
    "history": "full",
}


@pytest.mark.parametrize(
    ("stamp", "line"),
    [
        (STAMP, LINE),
        (
            GREEDY,
            "unnamed protocol; at most 9 to 12 turns by kind; full history; greedy, at most 9 tokens per turn",
        ),
        ({"name": "old"}, "old"),
        (
            {
                "name": "p",
                "select": {"name": "outcome", "among": "episodes", "samples": 8, "sees_outcome": True},
                "seed": 1,
            },
            "p; the best of 8 episodes of each task by outcome, which looks at the result; seed 1",
        ),
        (
            {"name": "p", "select": {"name": "likelihood", "among": "episodes", "samples": 2}},
            "p; the best of 2 episodes of each task by likelihood",
        ),
        (
            {"name": "p", "departures": {"temperature": {"protocol": 0.4, "here": 0.0}}},
            "p; departs from the protocol in temperature: 0.0 instead of 0.4",
        ),
        (
            {"name": "p", "request": {"temperature": None, "top_k": 5}},
            "p; each request with temperature=null; each request with top_k=5",
        ),
        ({"name": "p", "samples": None}, "p"),
        (
            {
                "name": "p",
                "n": 50,
                "samples": 8,
                "judge": {"model": "big", "rubric": "Is it kind?"},
                "user": {"model": "small"},
                "told": {"kto-001": " Succeed.", "kto-002": " Succeed."},
            },
            'p; n = 50, 8 episodes of each task; rewards by judge big; user played by small; told: " Succeed."',
        ),
    ],
)
def test_a_stamp_reads_as_one_line(stamp, line):
    """All there is, departures included; what an older stamp lacks is left out."""
    assert protocol_line(stamp) == line


def test_each_departure_from_a_protocols_decoding_is_noted():
    """Both values; a protocol without decoding leaves it open."""
    fixed = EpisodeProtocol("p", sampling=Sampling(0.4, max_new_tokens=512))

    assert _departures(fixed, Sampling(0.4, max_new_tokens=512)) == {}
    assert _departures(fixed, Sampling(max_new_tokens=64)) == {
        "temperature": {"protocol": 0.4, "here": 0.0},
        "max_new_tokens": {"protocol": 512, "here": 64},
    }
    assert _departures(EpisodeProtocol("p"), Sampling()) == {}
