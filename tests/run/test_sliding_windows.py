"""Models whose layers have a sliding window: training does not reach beyond it, so checks do not either."""

import json
import shutil

import pytest

from perturn.audit.dataset_audit import audit
from perturn.config.recipe import read_recipe
from perturn.errors import ConfigError
from perturn.run.execute import check, open_run


@pytest.fixture
def windowed(tiny_folder, tmp_path):
    """Return the folder of a Mistral with a window of 64 tokens and a context of 2048."""
    folder = tmp_path / "windowed"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": 64}))
    return folder


def test_a_limit_beyond_a_sliding_window_is_refused_before_the_run_has_a_folder(recipe, windowed):
    with pytest.raises(ConfigError, match=r"<= 64, the longest sequence that .* can be trained on, got 65"):
        open_run(recipe, [f"model.name={windowed}", "model.max_length=65"])


@pytest.mark.parametrize("command", ["evaluate", None])
def test_an_evaluation_reaches_beyond_a_sliding_window(recipe, windowed, command):
    """Without a training, the limit is the context of 2048."""
    stages = ["sft=null", "rows=null", "explore=null", "align=null"] if command is None else []
    words = [f"model.name={windowed}", *stages]
    check(read_recipe(recipe, [*words, "model.max_length=65"]), command=command)
    with pytest.raises(ConfigError, match=r"must be <= 2048, .* this model supports, got 2049"):
        check(read_recipe(recipe, [*words, "model.max_length=2049"]), command=command)


def test_the_audit_counts_what_a_sliding_window_cuts(windowed, tmp_path):
    """An answer that begins at token 80 of a row, which the context of 2048 would hold."""
    said = [{"role": "user", "content": "a " * 80}, {"role": "assistant", "content": "b"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": said}) + "\n")

    found = audit(tmp_path / "rows.jsonl", str(windowed))

    assert found["context"] == 64
    assert "max_length is 64" in found["refused"][0]["reason"]
