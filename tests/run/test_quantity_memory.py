"""GPU memory of the engine while quantities load a policy."""

from types import SimpleNamespace

import pytest

from perturn.run.stages import group_stage, quantity_source
from perturn.run.stages.quantity_source import read_needs


def session_of(iterations, events):
    """A session that records what its engine is told."""
    return SimpleNamespace(
        run=SimpleNamespace(paths=None, recipe=None),
        recipe=SimpleNamespace(iterations=iterations, staleness=0),
        rest=lambda: events.append("rest"),
        release=lambda: events.append("release"),
    )


@pytest.mark.parametrize(
    ("stage", "iterations", "needs", "expected"),
    [
        ("pair", 1, ["entropy"], ["release"]),
        ("pair-002", 3, ["entropy"], ["rest"]),
        ("branch", 1, ["entropy"], ["release"]),
        ("pair", 1, ["branch-returns"], []),
    ],
)
def test_the_engine_frees_its_memory_before_a_policy_is_loaded(
    stage, iterations, needs, expected, monkeypatch
):
    """It is closed if no iteration follows; without a policy it stays as it is."""
    events = []
    session = session_of(iterations, events)
    monkeypatch.setattr(quantity_source, "RunSource", lambda *_: None)
    monkeypatch.setattr(quantity_source, "compute", lambda *_: events.append("compute") or {})
    read_needs(session, SimpleNamespace(name=stage, iteration=1), [], needs)

    assert events == [*expected, "compute"]


def test_the_engine_frees_its_memory_before_a_credit_reads_a_policy(monkeypatch):
    """The source of the policies comes after."""
    events, credit = [], SimpleNamespace(needs=["entropy"])
    for name, replaced in {
        "traits_of": lambda _: credit,
        "own_credit": lambda _: ("grpo", credit),
        "measured": lambda _, episodes: episodes,
        "RunSource": lambda *_, **__: 1 / 0,
    }.items():
        monkeypatch.setattr(group_stage, name, replaced)
    stage = SimpleNamespace(iteration=1, reference=None)
    with pytest.raises(ZeroDivisionError):
        group_stage.weigh(session_of(1, events), stage, SimpleNamespace(rows=[]), {})

    assert events == ["release"]
