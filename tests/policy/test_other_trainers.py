"""What users of other trainers write first: each mistake is one line, before the reference is computed."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
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


def test_a_label_that_is_neither_true_nor_false_is_named(tmp_path):
    row = {"prompt": PAIR["prompt"], "completion": PAIR["chosen"], "label": 2}

    with pytest.raises(DataError, match="label must be true or false, got 2"):
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
    says = "too little memory to train: CUDA out of memory. Set gradient_checkpointing=true, a smaller token_budget"
    with pytest.raises(ModelError, match=says), memory_remedies(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    args.auto_find_batch_size = True  # accelerate catches the error, and tries a smaller batch
    with pytest.raises(torch.OutOfMemoryError), memory_remedies(args):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_accelerates_precision_is_the_references_too(tmp_path, monkeypatch):
    """Under `accelerate launch --mixed_precision bf16`, both run in bfloat16, so no reward differs from 0."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state(True)
    config = {"loss": "dpo", "max_steps": 1, "logging_steps": 1, "use_cpu": True, "save_strategy": "no"}
    found = trainer(tmp_path, config=config)
    found.train()
    precision = found.accelerator.mixed_precision
    AcceleratorState._reset_state(True)

    assert precision == "bf16"
    assert found.state.log_history[0]["rewards/chosen"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"eval_strategy": "steps"},
            "eval_strategy needs rows to evaluate on; give TurnTrainer an eval_dataset",
        ),
        ({"save_strategy": "best"}, "save_strategy=best needs metric_for_best_model"),
        ({"include_for_metrics": ["inputs"]}, "include_for_metrics must be without 'inputs'"),
        ({"rows_per_batch": 16}, "rows_per_batch must be <= 8, per_device_train_batch_size times"),
        ({"rows_per_batch": 8, "dataloader_drop_last": True}, "dataloader_drop_last must be False with rows"),
    ],
)
def test_what_transformers_rejects_is_rejected_before_the_reference(tmp_path, config, says):
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, config=config, model="no/such/model")


def test_tokens_of_packs_are_counted(tmp_path):
    """The count is the number of tokens in the pair's one pack."""
    config = {"max_steps": 1, "include_num_input_tokens_seen": True, "use_cpu": True, "save_strategy": "no"}
    found = trainer(tmp_path, config=config)
    found.train()

    assert found.state.num_input_tokens_seen == found.tokens_passed > 0


def test_a_processor_is_no_tokenizer(tmp_path):
    processor = SimpleNamespace(tokenizer=None, chat_template="")
    says = "processing_class must be a tokenizer, got 'SimpleNamespace'. Of a processor, give processor.tokenizer"
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, processing_class=processor)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    found = trainer(tmp_path, config={"use_cpu": True})
    with pytest.raises(
        ModelError, match=r"there is no checkpoint at '.*nope'; correct the path, or pass True"
    ):
        found.train(resume_from_checkpoint=str(tmp_path / "nope"))


def test_pairs_become_rows_of_kto_by_their_labels(tmp_path):
    with pytest.raises(
        DataError, match=r"make two rows of each pair: .* chosen .* label true, .* label false"
    ):
        trainer(tmp_path, config={"loss": "kto"})
