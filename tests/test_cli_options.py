"""Options of the command line that belong to another option or are out of range, Ctrl-C, and other systems."""

import io
import math
import resource
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from perturn.cli import main
from perturn.cli._base import say_json
from perturn.data.run_paths import RunPaths


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["init", "mine.yaml", "--from", "demo", "--lora", "seed=1"],
            "--lora and seed=1 belong to init without --from; leave it out, and edit the copied recipe.",
        ),
        (["check-credit", "rloo", "name=gigpo"], "name=gigpo belongs to the first argument; write"),
        *(
            (["watch", ".", "--every", each], "--every must be from 0.1 to 3600")
            for each in ("-1", "0", "nan", "1e30")
        ),
        (["inspect", "rows.jsonl", "--max-length", "0"], "--max-length must be >= 1, got 0."),
        (
            ["inspect", "rows.jsonl", "--check", "--limit", "0"],
            "--limit belongs to inspect without --check; leave",
        ),
        (["init", "--list", "--lora"], "--lora belongs to init without --list; leave it out."),
        (["init", "a.yaml", "--list"], "FILE belongs to init without --list; leave it out."),
        (
            ["evaluate", "--model", "m", "--environment", "alfworld-like", "--n", "1", "evaluate.tasks.n=3"],
            "--n sets evaluate.tasks.n; leave evaluate.tasks.n=... out.",
        ),
        (
            ["evaluate", "--model", "m", "--environment", "alfworld-like", "model={name: o}"],
            "the model sets model.name; leave model=... out.",
        ),
        (
            ["export", "run", "--to", "hub", "--private"],
            "--private belongs to --repo; add it, or leave --private",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_rejected(perturn, words, says, tmp_path, monkeypatch):
    """In one line, before any work."""
    monkeypatch.chdir(tmp_path)

    code, _, notices = perturn(*words)

    assert code == 2
    assert says in " ".join(notices.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "resumes"), [("list", False), ("run", True)])
def test_only_a_command_that_resumes_says_so_after_ctrl_c(perturn, monkeypatch, name, resumes):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("perturn.cli.app", stop)

    code, _, notices = perturn(name)

    assert code == 130
    assert notices.strip() == "stopped" + "; the same command goes on from here" * resumes


def test_windows_is_rejected_in_one_line(perturn, monkeypatch):
    monkeypatch.setattr("perturn.cli.os", SimpleNamespace(name="nt"))

    code, _, notices = perturn("list", "losses")

    assert code == 2
    assert notices.startswith("error: Windows is not supported; use WSL2")


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(256, 1000, 1000), (256, -1, 10240), (20000, 20000, 20000)]
)
def test_a_command_may_open_more_files_than_the_system_s_default(perturn, monkeypatch, soft, hard, after):
    """256 on macOS; a higher limit is kept, and so is the administrator's."""
    limits = {"now": (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.update(now=wanted))
    perturn("list", "losses")

    assert limits["now"] == (after, hard)


def test_options_of_measure_that_nothing_would_read_are_rejected(perturn, tmp_path):
    """A width is forecast, and gradients are measured."""
    for words, said in (
        (["--width", "0.2"], "--width belongs to --dry-run"),
        (["--dry-run", "--gradients"], "--gradients belongs to a measurement"),
    ):
        code, _, notices = perturn("measure", str(tmp_path), *words)

        assert (code, said in " ".join(notices.split())) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--threshold", "nan"], "--threshold must be >= 0, got nan."),
        (["--threshold", "-1"], "--threshold must be >= 0, got -1.0."),
        (["--threshold", "0.5"], "--threshold belongs to --rows pairs; add it, or leave it out."),
        (["--success-at", "nan"], "--success-at must be a finite number, got nan."),
    ],
)
def test_a_number_of_import_logs_that_cannot_apply_is_rejected(perturn, tmp_path, words, says):
    code, _, notices = perturn("import-logs", tmp_path / "log.jsonl", *words)

    assert (code, notices.strip()) == (2, f"error: {says}")


def test_json_has_null_for_a_number_that_is_not_finite(capsys):
    """JSON has no NaN."""
    say_json({"a": [math.nan, (math.inf, 1.5)], "b": "NaN", "c": True})

    assert capsys.readouterr().out == '{"a": [null, [null, 1.5]], "b": "NaN", "c": true}\n'


def test_a_command_in_a_message_quotes_its_path(perturn, tmp_path):
    file = tmp_path / "my recipe.yaml"

    _, printed, _ = perturn("init", file, "--from", "demo")

    assert f"next: perturn run '{file}' --dry-run" in printed


def test_a_latin_1_terminal_shows_other_characters_as_escapes(monkeypatch):
    """The headline of a run has an arrow."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    monkeypatch.setattr("perturn.cli.app", lambda: print("0.1 → 0.2", flush=True))

    main()

    assert written.getvalue() == b"0.1 \\u2192 0.2\n"


def test_the_summary_of_a_run_is_ascii_json(perturn, monkeypatch, tmp_path):
    """A Latin-1 terminal would escape other characters, and the line would be no JSON."""
    (tmp_path / "summary.json").write_text('{"task": "\U0001f600"}', encoding="utf-8")
    opened = SimpleNamespace(folder=tmp_path, paths=RunPaths(tmp_path))
    monkeypatch.setattr("perturn.run.execute.open_run", lambda recipe: nullcontext(opened))
    monkeypatch.setattr("perturn.run.execute.run_stages", lambda run: None)
    monkeypatch.setattr("perturn.report.write_report", lambda folder: folder)

    lines = perturn("run", "demo", "--json")[1].splitlines()
    assert lines == ['{"task": "\\ud83d\\ude00"}'] * 2  # the demo has a recipe that follows
