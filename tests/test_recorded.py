"""Recordings: made once for all workers, also when making one failed before."""

import pytest

from support.recorded import Recordings


@pytest.fixture
def two(tmp_path, monkeypatch):
    """The recordings as two workers of one session see them."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    bases = [tmp_path / "gw0", tmp_path / "gw1"]
    for base in bases:
        base.mkdir()
    return [Recordings(base) for base in bases]


def test_a_recording_is_made_once_for_all_workers(two):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "file").write_text("x")

    found = [recorded(make, "name", 1) for recorded in two]
    other = two[1](make, "name", 2)

    assert made == [found[0], other]
    assert found[0] == found[1] != other
    assert (other / "file").read_text() == "x"


def test_a_recording_that_failed_is_made_anew_from_nothing(two):
    def fail(folder):
        (folder / "half").touch()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        two[0](fail, "name")
    found = two[1](lambda folder: (folder / "whole").touch(), "name")

    assert [file.name for file in found.iterdir()] == ["whole"]


def test_a_copy_may_be_changed(two, tmp_path):
    def make(folder):
        (folder / "file").write_text("x")

    copy = two[0].copy(tmp_path / "copy", make, "name")
    (copy / "file").write_text("y")

    assert (two[1](make, "name") / "file").read_text() == "x"
