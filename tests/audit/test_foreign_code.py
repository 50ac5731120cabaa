"""A run folder of others may name code and hold it; reading the folder does not import it."""

import json

import pytest

from perturn.analysis.run_contents import read_run
from perturn.audit.training_view import recipe_of
from perturn.run.verify_run import verify

PARTS = {
    "rows": "evil.py:Rows",
    "align": "{loss: {name: evil.py:Loss}, learning_rate: 1.0e-6}",
    "explore": "evil.py:Explorer",
}


@pytest.fixture(params=PARTS)
def folder(request, tmp_path, monkeypatch, tiny_folder):
    """A run whose recipe names a file beside it, which leaves a trace once it is imported."""
    monkeypatch.chdir(tmp_path)
    value = PARTS[request.param]
    section = value if value.startswith("{") else f"{{name: {value}}}"
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(
        f"name: run\nmodel: {{name: {tiny_folder}}}\nenvironment: {{name: alfworld-like}}\n"
        f"{request.param}: {section}\n"
        + ("" if request.param == "align" else "align: {loss: {name: dpo}, learning_rate: 1.0e-6}\n")
    )
    (run / "manifest.json").write_text(json.dumps({"stages": {}, "files": {}}))
    (run / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()\n")
    return run


def test_a_run_folder_s_code_is_imported_only_if_it_is_trusted(folder, perturn, tmp_path):
    read_run(folder)
    code, _, said = perturn("inspect", folder)

    assert (code, "names code, and this command runs no code of a run folder" in said) == (2, True)
    assert "add --trust" in said
    assert not (tmp_path / "trace").exists()
    code, _, said = perturn("inspect", folder, "--trust")
    assert (code, (tmp_path / "trace").exists()) == (2, True)


def test_verify_imports_no_code(folder, tmp_path):
    """The remedy of the missing file would be made from the recipe."""
    gone = {"bytes": 1, "modified_ns": 1, "sha256": "", "stage": "expert"}
    files = {"trajectories/expert.jsonl": gone}
    (folder / "manifest.json").write_text(json.dumps({"stages": {}, "files": files}))

    remedies = verify(folder).remedies

    assert not (tmp_path / "trace").exists()
    assert any(each.startswith("restore what expert made from a copy; ") for each in remedies)


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_that_the_user_types_is_imported(own, perturn, tmp_path, monkeypatch, tiny_folder):
    """A run's own loss needs --trust."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / 'trace')!r}, 'w').close()\nfrom perturn.losses.dpo import DPO as Loss\n"
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(
        f"name: run\nmodel: {{name: {tiny_folder}}}\nenvironment: {{name: alfworld-like}}\n"
        f"align: {{loss: {{name: {'mine.py:Loss' if own else 'dpo'}}}, learning_rate: 1.0e-6}}\n"
    )
    (run / "manifest.json").write_text(json.dumps({"stages": {}, "files": {}}))

    _, _, said = perturn("inspect", run, *(["--trust"] if own else ["--loss", "mine.py:Loss"]))

    assert "runs no code of a run folder" not in said
    assert (tmp_path / "trace").exists(), said


def test_the_code_of_a_run_is_found_from_another_working_directory(
    perturn, tmp_path, monkeypatch, tiny_folder
):
    """The run has recorded the folder of the file; its recipe has only the relative path."""
    (tmp_path / "mine.py").write_text("from perturn.losses.dpo import DPO as Loss\n")
    run = tmp_path / "run (copy)"
    run.mkdir()
    (run / "recipe.yaml").write_text(
        f"name: run\nmodel: {{name: {tiny_folder}}}\nenvironment: {{name: alfworld-like}}\n"
        "align: {loss: {name: mine.py:Loss}, learning_rate: 1.0e-6}\n"
    )
    inputs = {
        "align.loss.name": {"kind": "code", "given": "mine.py:Loss", "folder": str(tmp_path), "files": {}}
    }
    (run / "manifest.json").write_text(json.dumps({"stages": {}, "files": {}, "inputs": inputs}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    recipe = recipe_of(run)

    assert recipe.align.loss["name"] == "../mine.py:Loss"
