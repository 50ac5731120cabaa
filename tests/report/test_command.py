"""`turnwise report`: of one run, of several, and of a run whose recipe is of another version."""

import sys

import pytest

from turnwise.cli import main


@pytest.fixture
def turnwise(monkeypatch, capsys):
    """Runs a command in this process: (exit code, output without line breaks, notices)."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["turnwise", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return caught.value.code or 0, said.out.strip(), said.err

    return command


def test_a_run_is_reported_from_its_folder_alone(turnwise, run):
    """Its recipe has keys that recipes do not have now."""
    assert turnwise("report", run) == (0, str(run / "report.html"), "")


def test_several_runs_are_one_page(turnwise, make, run, tmp_path):
    other = make.whole_run(tmp_path / "other")

    assert turnwise("report", run, other) == (0, str(tmp_path / "report-run-other.html"), "")
    assert turnwise("report", run, other, "-o", tmp_path / "both.html")[1] == str(tmp_path / "both.html")
    assert (other / "summary.json").is_file()
    assert not (run / "report.html").exists()


def test_settings_without_a_run_are_refused(turnwise):
    code, _, said = turnwise("report", "seed=1")

    assert (code, said) == (2, "error: report needs a run folder or a recipe before its settings.\n")
