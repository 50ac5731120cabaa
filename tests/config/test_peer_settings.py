"""Settings of TRL and transformers: each has a sentence that says what to write instead, or why there is none."""

import ast
import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from perturn import TurnConfig
from perturn.config.key_suggestions import keys_of
from perturn.config.parsing import parse
from perturn.config.peer_settings import peers
from perturn.config.recipe import Recipe
from perturn.errors import ConfigError

PEERS = peers()
OF_TRANSFORMERS_4 = {"overwrite_output_dir", "save_safetensors", "logging_dir", "no_cuda", "use_mps_device"}
CONFIGS = ("dpo", "sft", "grpo", "rloo", "kto")
OWN_SETTINGS = {field.name for field in fields(TurnConfig)}


def of_trl(name):
    """Settings that a config class of the installed TRL declares, read without importing it."""
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    file = Path(spec.submodule_search_locations[0]) / "trainer" / f"{name}_config.py"
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    body = [node for each in classes for node in each.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id for node in body}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_of_trl_is_known(name):
    """Those that TurnConfig has as well are settings of its own."""
    assert of_trl(name) - PEERS.keys() - OWN_SETTINGS - {"_VALID_DICT_FIELDS"} == set()


def test_settings_that_transformers_removed_are_known():
    """A setting that transformers has needs no advice."""
    assert PEERS.keys() - OWN_SETTINGS >= OF_TRANSFORMERS_4


@pytest.mark.parametrize("name", sorted(PEERS.keys() - OWN_SETTINGS))
def test_turn_config_says_what_to_write(name, tmp_path):
    """A ConfigError with the sentence, not a TypeError of Python."""
    with pytest.raises(ConfigError) as caught:
        TurnConfig(output_dir=str(tmp_path), **{name: 1})

    assert str(caught.value) == f"unknown setting {name!r} of TurnConfig. {PEERS[name].in_config}"


@pytest.mark.parametrize("key", ["beta", "align.beta", "model.padding_free", "per_device_train_batch_size"])
def test_a_recipe_says_what_to_write(key):
    """In whatever section it was tried."""
    section, _, name = key.rpartition(".")
    data = {"name": "one", "model": {"name": "none"}, "align": {"loss": {"name": "dpo"}}}
    (data[section] if section else data)[name] = 1

    with pytest.raises(ConfigError) as caught:
        parse(Recipe, data)

    assert str(caught.value) == f"unknown key {key!r}. {PEERS[name].in_recipe}"


def test_what_is_to_be_written_exists():
    """Dotted keys that the sentences name are keys of a recipe, but for settings of entries."""
    known, entries = set(keys_of(Recipe)), ("align.loss.", "credit.", "engine.")
    key_of_a_section = rf"\b(?:{'|'.join(each.name for each in fields(Recipe))})\.[a-z_.0-9]+"
    named = {
        key.rstrip(".")
        for peer in PEERS.values()
        for key in re.findall(key_of_a_section, f"{peer.in_config} {peer.in_recipe}")
    }

    assert {key for key in named if key not in known and not key.startswith(entries)} == set()


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_a_sentence_is_one_sentence(peer):
    """Of at most 25 words."""
    for sentence in (peer.in_config, peer.in_recipe):
        assert sentence.endswith(".")
        assert len(sentence.split()) <= 25, sentence


def test_a_misspelt_setting_of_turn_config_is_told(tmp_path):
    """Of transformers' and of ours."""
    for word, meant in (("learning_rat", "learning_rate"), ("token_budge", "token_budget")):
        with pytest.raises(
            ConfigError, match=f"unknown setting '{word}' of TurnConfig. Did you mean '{meant}'"
        ):
            TurnConfig(output_dir=str(tmp_path), **{word: 1})
    with pytest.raises(ConfigError, match="unknown setting 'zzzzzz' of TurnConfig"):
        TurnConfig(output_dir=str(tmp_path), zzzzzz=1)


def test_the_number_of_scored_episodes_is_no_setting_of_a_selector():
    """A selector scores one of several episodes."""
    assert PEERS["num_generations_eval"].in_recipe.startswith("Write evaluate.samples, ")


def test_advice_on_trls_grpo_keeps_the_meaning_of_a_setting():
    """TRL counts completions and micro-batches, chooses the averaging by `loss_type`, and masks at a token limit."""
    said = {name: PEERS[name].in_recipe for name in PEERS}

    assert "token_mean (dapo), trajectory_mean (grpo)" in said["loss_type"]
    assert "generation_batch_size / num_generations" in said["generation_batch_size"]
    assert "steps_per_generation / gradient_accumulation_steps" in said["steps_per_generation"]
    assert "rows.signals={without: [cut]}" in said["mask_truncated_completions"]
    assert "ratio_gradient=mean" in said["importance_sampling_level"]
    assert said["f_divergence_type"] == said["f_alpha_divergence_coef"] == said["discopop_tau"]


def test_sharding_of_a_recipe_is_not_in_accelerates_configuration():
    """`perturn train` rejects accelerate's settings of FSDP and DeepSpeed."""
    assert PEERS["fsdp"].in_recipe == "Write launch.sharding=fsdp2 with launch.processes."
    assert "accelerate" not in PEERS["deepspeed"].in_recipe


def test_a_warmup_ratio_is_told_how_turn_config_takes_it():
    """Transformers takes a share of the steps as `warmup_steps`."""
    assert "warmup_steps, which below 1 is a share" in PEERS["warmup_ratio"].in_config
