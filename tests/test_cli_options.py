"""Options of the command line that belong to another option or are out of range, and Ctrl-C."""

import pytest


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
