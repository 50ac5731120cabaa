"""`perturn report`: of one run, of several, and of a run whose recipe is of another version."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from perturn.cli import main
from perturn.report import _page_path


@pytest.fixture
def perturn(monkeypatch, capsys):
    """Runs a command in this process: (exit code, output without line breaks, notices)."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["perturn", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return caught.value.code or 0, said.out.strip(), said.err

    return command


def test_a_run_is_reported_from_its_folder_alone(perturn, run):
    """Its recipe has keys that recipes do not have now."""
    assert perturn("report", run) == (0, str(run / "report.html"), "")


def test_several_runs_are_one_page(perturn, make, run, tmp_path):
    other = make.whole_run(tmp_path / "other")

    assert perturn("report", run, other) == (0, str(tmp_path / "report-run-other.html"), "")
    assert perturn("report", run, other, "-o", tmp_path / "both.html")[1] == str(tmp_path / "both.html")
    assert (other / "summary.json").is_file()
    assert not (run / "report.html").exists()


def test_settings_without_a_run_are_refused(perturn):
    code, _, said = perturn("report", "seed=1")

    remedy = "name a run folder or a recipe before the settings"
    assert (code, said) == (2, f"error: RUN is missing, and report shows one; {remedy}.\n")


def test_the_page_of_a_study_is_written_in_its_folder(perturn, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(Path(__file__).parents[2] / "studies/results/weak", study)
    (study / "summary.json").unlink()

    assert perturn("report", study) == (0, str(study / "report.html"), "")
    assert (study / "summary.json").is_file()
    remedy = f"give {study} alone, which is a study and has its page in its folder"
    given = [("KEY=VALUE", ["seed=1"]), ("--output", ["-o", "page.html"]), ("a second path", [tmp_path])]
    for name, more in given:
        code, _, said = perturn("report", study, *more)
        assert (code, said) == (2, f"error: {name} belongs to a report of runs; {remedy}.\n")


def test_the_page_of_many_runs_has_a_short_name(tmp_path):
    """The hash tells other runs with the same first name apart."""
    paths = [tmp_path / f"alfworld_qwen3-4b_tlm-dre_seed-{seed}-é" for seed in range(8)]

    names = [_page_path(each).name for each in (paths, paths[:-1], paths[:5])]

    assert re.fullmatch(r"report-alfworld_qwen3-4b_tlm-dre_seed-and-7-others-[0-9a-f]{8}\.html", names[0])
    assert len(set(names)) == 3
    assert names[2] == f"report-{'-'.join(path.name for path in paths[:5])}.html"
