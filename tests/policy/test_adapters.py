"""Adapters in a folder of their own: trained further, played, scored and merged by its path."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from perturn import collect
from perturn.chat.model_names import load_config, load_tokenizer, resolve_model
from perturn.errors import ConfigError, ModelError
from perturn.policy.lora_adapters import load_adapters
from perturn.policy.models import add_adapters, load_model
from perturn.report import summarize
from perturn.run.execute import open_run, run_stages

from .training import PAIRS

IDS = torch.arange(40)[None]


def lora():
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)


@pytest.fixture
def adapted(train, tiny_folder, tmp_path, monkeypatch):
    """A folder of adapters that a trainer wrote, and what their model answers."""
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    trainer = train(model=str(tiny_folder), peft_config=lora(), learning_rate=0.05)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    return str(tmp_path / "adapters"), trainer.model.eval()(IDS).logits.detach()


def test_a_folder_of_adapters_is_the_model_that_was_trained(adapted, tiny_folder):
    """Merged and upon their model; config and tokenizer need no merge."""
    folder, trained = adapted
    assert load_config(folder).hidden_size == load_config(str(tiny_folder)).hidden_size
    assert load_tokenizer(folder).chat_template == load_tokenizer(str(tiny_folder)).chat_template

    assert_close(load_model(folder)(IDS).logits, trained, atol=1e-5, rtol=1e-4)
    assert_close(load_adapters(folder)(IDS).logits, trained, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(load_model(str(tiny_folder))(IDS).logits, trained, atol=1e-3)


def assert_only_weights_are_cast(model):
    """Parameters in bfloat16; frequencies of the rotary embedding in float32, as the config gives them."""
    frequencies = [each for name, each in model.named_buffers() if name.endswith("inv_freq")]
    expected = load_model("tiny-agent").model.rotary_emb.inv_freq

    assert {each.dtype for name, each in model.named_parameters() if "lora" not in name} == {torch.bfloat16}
    assert len(frequencies) == 2
    assert all(torch.equal(each, expected) for each in frequencies)


def test_merged_adapters_in_bfloat16_keep_exact_positions(tmp_path):
    """Such as rsLoRA, which peft merges; casting the whole model would round the frequencies too."""
    settings = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", use_rslora=True)
    add_adapters(load_model("tiny-agent"), settings, 0).save_pretrained(tmp_path)

    assert_only_weights_are_cast(load_model(str(tmp_path), dtype=torch.bfloat16))


def test_frozen_weights_of_fsdp2_keep_exact_positions(train):
    """Before the model is divided, which needs several processes."""
    trainer = train()
    trainer.turn_args.fsdp = True

    assert_only_weights_are_cast(trainer._compute_inputs([], load_model("tiny-agent"), None, lora(), None))


def test_adapters_are_merged_once_and_again_when_they_change(adapted):
    """Only the newest copy stays in the cache."""
    folder, _ = adapted
    said = []
    first = resolve_model(folder, said.append)
    assert resolve_model(folder, said.append) == first
    assert len(said) == 1
    file = f"{folder}/adapter_model.safetensors"
    save_file({name: weight * 2 for name, weight in load_file(file).items()}, file)
    second = resolve_model(folder, said.append)

    assert len(said) == 2
    assert second != first
    with pytest.raises(ModelError):
        load_model(first)
    assert not torch.allclose(load_model(folder)(IDS).logits, adapted[1], atol=1e-3)


def test_adapters_are_trained_further_by_their_folder(train, adapted, tiny_folder, tmp_path):
    """They alone, with their dropout; the reference is the policy as it was loaded, not the model beneath."""
    folder, trained = adapted
    trainer = train(model=folder, eval_dataset=PAIRS[:2], learning_rate=0.05)
    assert_close(trainer.model.eval()(IDS).logits, trained, atol=1e-5, rtol=1e-4)
    assert all("lora" in name for name, each in trainer.model.named_parameters() if each.requires_grad)
    assert {
        each.p for name, each in trainer.model.named_modules() if name.endswith("lora_dropout.default")
    } == {0.1}
    assert trainer.evaluate()["eval_rewards/chosen"] == 0
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model(str(tmp_path / "further"))

    assert after["eval_rewards/chosen"] != 0
    assert trainer.evaluate(PAIRS[:2])["eval_rewards/chosen"] == pytest.approx(
        after["eval_rewards/chosen"], rel=1e-4
    )
    assert_close(load_model(str(tmp_path / "further"))(IDS).logits, trainer.model.eval()(IDS).logits)
    beneath = trainer.model.get_base_model().model.embed_tokens.weight
    assert torch.equal(beneath, load_model(str(tiny_folder)).model.embed_tokens.weight)


def test_a_peft_model_is_trained_further_and_its_adapters_are_part_of_the_reference(train, adapted):
    """As TRL does; with new adapters beside its own it is refused, and so is one with nothing to train."""
    folder, trained = adapted
    trainer = train(model=load_adapters(folder, trainable=True), eval_dataset=PAIRS[:2])
    assert trainer.evaluate()["eval_rewards/chosen"] == 0
    assert_close(trainer.model.eval()(IDS).logits, trained, atol=1e-5, rtol=1e-4)

    with pytest.raises(
        ConfigError, match=r"peft_config belongs to a model without adapters; leave it out .*merge_and_unload"
    ):
        train(model=load_adapters(folder, trainable=True), peft_config=lora())
    with pytest.raises(ConfigError, match=r"no weight of the model is to be trained.*is_trainable=True"):
        train(model=load_adapters(folder))


@pytest.mark.filterwarnings(
    "ignore:Could not find a config file:UserWarning"
)  # peft's, of the folder of the first
def test_new_adapters_are_trained_upon_merged_ones(train, adapted, tmp_path):
    """Their model is the folder of the first adapters."""
    folder, trained = adapted
    trainer = train(model=folder, peft_config=lora(), eval_dataset=PAIRS[:2], learning_rate=0.05)
    assert trainer.evaluate()["eval_rewards/chosen"] == 0
    trainer.train()
    trainer.save_model(str(tmp_path / "second"))

    assert (
        json.loads((tmp_path / "second/adapter_config.json").read_text())["base_model_name_or_path"] == folder
    )
    found = load_model(str(tmp_path / "second"))(IDS).logits
    assert_close(found, trainer.model.eval()(IDS).logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, trained, atol=1e-3)


@pytest.mark.slow
def test_adapters_play_and_are_scored_by_their_folder(adapted, recipe, own_environment):
    """By `collect`, and by a recipe whose `model.name` it is, which trains all weights of the merged model."""
    folder, _ = adapted
    played = collect(folder, own_environment.GuessNumber, n=2)
    assert len(played) == 2
    run = open_run(recipe, [f"model.name={folder}", "evaluate.tasks.n=2"])
    run_stages(run)

    assert [row["name"] for row in summarize(run.folder)["policies"]] == ["base", "sft", "tlm-dre"]
    assert (run.folder / "checkpoints/sft/model.safetensors").is_file()


def changed(folder, **settings):
    """The folder with other settings of its adapters."""
    with open(f"{folder}/adapter_config.json") as file:
        known = json.load(file)
    with open(f"{folder}/adapter_config.json", "w") as file:
        json.dump(known | settings, file)


BAD = [
    (lambda folder: changed(folder, base_model_name_or_path=None), "do not say what model they belong to"),
    (lambda folder: changed(folder, base_model_name_or_path=folder), "name their own folder as their model"),
    (
        lambda folder: changed(folder, base_model_name_or_path="/no/model"),
        "for the model in /no/model, which is gone",
    ),
    (
        lambda folder: changed(folder, base_model_name_or_path="../gone"),
        "/gone, which is gone; put that folder back",
    ),
    (lambda folder: open(f"{folder}/adapter_model.safetensors", "w").close(), "cannot be read"),
    (lambda folder: open(f"{folder}/adapter_config.json", "w").close(), "cannot be read"),
    (lambda folder: open(f"{folder}/model.safetensors", "w").close(), "holds a model .* and adapters"),
    (
        lambda folder: shutil.move(f"{folder}/adapter_model.safetensors", f"{folder}/x"),
        "without adapter_model",
    ),
]


@pytest.mark.parametrize(("spoil", "text"), BAD, ids=[text for _, text in BAD])
def test_a_folder_of_adapters_that_cannot_be_used_says_why(adapted, spoil, text):
    spoil(adapted[0])
    with pytest.raises(ModelError, match=text):
        load_model(adapted[0])


def test_adapters_without_peft_name_the_command(adapted, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'need peft; run: pip install "perturn\[lora\]"'):
        load_model(adapted[0])


@pytest.mark.filterwarnings("ignore")  # peft warns of tied layers
@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_adapters_on_a_tied_layer_are_not_merged(layer, tmp_path):
    """In the one weight, they would change both the input and the output embeddings."""
    settings = LoraConfig(r=2, target_modules=[layer], task_type="CAUSAL_LM")
    get_peft_model(load_model("tiny-agent"), settings).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=f"change (model.)?{layer}, .* with tie_word_embeddings=False"):
        load_model(str(tmp_path))
