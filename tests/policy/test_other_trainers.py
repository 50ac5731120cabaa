"""What users of other trainers write first: each mistake is one line, before the reference is computed."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from perturn import TurnConfig, TurnTrainer
from perturn.errors import ConfigError, DataError, ModelError
from perturn.training.memory_errors import memory_remedies
from support.models import make_tiny_model

PAIR = {
    "prompt": [{"role": "user", "content": "go"}],
    "chosen": [{"role": "assistant", "content": "take mug 1"}],
    "rejected": [{"role": "assistant", "content": "inventory"}],
}


def trainer(folder, rows=(PAIR,), args=None, config=None, model="tiny-agent", **more):
    """A trainer of the packaged policy on rows."""
    args = args or TurnConfig(output_dir=str(folder / "out"), report_to=[], **(config or {}))
    return TurnTrainer(model, args, train_dataset=list(rows), **more)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("tokenizer", "TurnTrainer takes no argument 'tokenizer'; write processing_class."),
        ("data_collator", "takes no argument 'data_collator'; rows are packed without padding"),
        ("model_init", "takes no argument 'model_init'; give the model."),
        ("beta", "takes no argument 'beta'; beta is a setting of the loss"),
        ("reward_funcs", "takes no argument 'reward_funcs'; rewards belong to an environment"),
        ("colour", "takes no argument 'colour'; known: callbacks, "),
        ("compute_loss_func", "compute_loss_func must be None; name a loss of your own"),
    ],
)
def test_arguments_of_other_trainers_are_named(tmp_path, argument, says):
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, **{argument: object()})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel replaces the model's forward pass"),
        (
            {"neftune_noise_alpha": 5.0},
            "neftune_noise_alpha must be None, got 5.0. Its noise would depend on how",
        ),
    ],
)
def test_settings_that_packing_breaks_are_rejected(tmp_path, config, says):
    with pytest.raises((ConfigError, ValueError), match=says):
        trainer(tmp_path, config=config)


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (
            "tiny-agent",
            "tiny-agent",
            r"processing_class must be a tokenizer \(.*\), not its name, got 'tiny-agent'\.",
        ),
        (make_tiny_model(), None, "a tokenizer is missing, .*; give it as processing_class="),
    ],
    ids=["name", "none"],
)
def test_a_tokenizer_is_asked_for_by_the_name_of_the_argument(tmp_path, model, given, says):
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, model=model, processing_class=given)


def test_settings_of_another_trainer_are_rejected(tmp_path):
    says = r"args must be a perturn.TurnConfig, got 'TrainingArguments'. Write TurnConfig"
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, args=TrainingArguments(output_dir=str(tmp_path / "out")))


def test_prompt_tuning_is_rejected(tmp_path):
    peft = pytest.importorskip("peft")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)

    says = "peft_config must change layers, not the prompt, got 'PromptTuningConfig'"
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, peft_config=prompts)


def test_a_label_that_is_a_number_is_named(tmp_path):
    row = {"prompt": PAIR["prompt"], "completion": PAIR["chosen"], "label": 1}

    with pytest.raises(DataError, match="label must be true or false, got 1"):
        trainer(tmp_path, [row], config={"loss": {"name": "kto"}})


@pytest.mark.parametrize("template", [None, "qwen2.5"])
@pytest.mark.parametrize(
    "row", [{"text": "take mug 1"}, {"messages": [{"role": "assistant", "content": "take mug 1"}]}]
)
def test_rows_that_begin_with_the_assistant_are_trained(tmp_path, whole_vocabulary, row, template):
    """Also a text alone, whose template then renders an empty conversation first."""
    config = {"loss": {"name": "sft"}, "max_steps": 1, "chat_template": template}
    found = trainer(tmp_path, [row], config=config, model=str(whole_vocabulary))

    assert found.train().training_loss > 0
    (example,) = found.train_dataset
    assert example.chosen.turns == 1


def test_too_little_memory_names_what_to_change():
    args = SimpleNamespace(token_budget=4096, gradient_checkpointing=False, auto_find_batch_size=False)
    says = "for a training step: CUDA out of memory. Set gradient_checkpointing=true, a smaller token_budget"
    with pytest.raises(ModelError, match=says), memory_remedies(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    args.auto_find_batch_size = True  # accelerate catches the error, and tries a smaller batch
    with pytest.raises(torch.OutOfMemoryError), memory_remedies(args):
        raise torch.OutOfMemoryError("CUDA out of memory.")
