"""Settings of TRL and transformers that Perturn names otherwise or does not need, and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Answers to a setting of TRL or transformers: the setting to write instead, or why there is none."""

    in_config: str
    """In `TurnConfig`, or where rows are given to `TurnTrainer`."""
    in_recipe: str
    """In a recipe, or as a `key=value` word."""


def _loss(setting: str, meaning: str, example: str = "dpo", value: str = "0.1") -> Peer:
    """Return what to write for a setting of a loss."""
    return Peer(
        f"{meaning} is a setting of the loss: write loss={{'name': '{example}', '{setting}': {value}}}.",
        f"{meaning} is a setting of the loss: write align.loss.{setting}, with a loss that has it, such as {example}.",
    )


def _played(key: str, meaning: str) -> Peer:
    """Return what to write for a setting of how episodes are played."""
    return Peer(
        f"TurnTrainer plays no episodes, so it has no {meaning}; in a recipe it is {key}.",
        f"Write {key}, which is the {meaning}.",
    )


def _same(sentence: str) -> Peer:
    """Return one sentence for both places."""
    return Peer(sentence, sentence)


def _each(names: str, peer: Peer) -> dict[str, Peer]:
    """Return the same answer for several settings."""
    return dict.fromkeys(names.split(), peer)


def _only_recipe(key: str, sentence: str = "") -> Peer:
    """Return the key of a recipe for an argument that `TurnConfig` has too."""
    return Peer(f"In a recipe it is {key}.", f"Write {key}{sentence}.")


def _vllm(option: str) -> Peer:
    """Return what to write for a setting of vLLM."""
    return Peer(
        "TurnTrainer plays no episodes; in a recipe, vLLM is engine.name=vllm with its settings in engine.options.",
        f"Write engine.name=vllm and {option}.",
    )


_PACKED = "Rows are always packed without padding, so there is nothing to switch on; leave it out."
_TURNS_DROPPED = (
    "There is no limit of the prompt alone: {key} limits the whole conversation, and whole turns are dropped from its "
    "end."
)
_REFERENCE = (
    "Reference log-probabilities are always computed once before training and kept in a cache; leave it out."
)
_ACTIONS = "Only what the assistant wrote carries loss; {key}=all puts loss on the other messages too."
_OWN_ROWS = "Rows are read in TRL's formats by their keys, so no field has to be named; leave it out."
_SYNCED = Peer(
    "The reference of TurnTrainer does not move; in a recipe, align.reference=average follows the policy.",
    "Write align.reference=average with align.reference_decay: the reference then follows from iteration to iteration.",
)
_VARIANT = "A loss is chosen by its name: write {key}; `perturn list losses` shows them."
_REWARDS = "The environment gives the reward of each turn; there are no reward functions to weigh."
_LOADED = Peer(
    "Load the model with from_pretrained(...) and give TurnTrainer the object.",
    "Write model.name and model.dtype; a recipe has no further arguments of from_pretrained.",
)
_TOKENIZER = _same(
    "The tokenizer decides this; change it there, and give it as processing_class or in the model's folder."
)
_ENTROPY = _same("No loss of Perturn has an entropy bonus; leave it out.")
_NO_VARIANT = _same(
    "It belongs to a loss that Perturn does not have; `perturn list losses` shows those that it has."
)

PEERS: dict[str, Peer] = {
    # Losses
    "beta": _loss("beta", "beta"),
    "loss_type": Peer(_VARIANT.format(key="loss={'name': ...}"), _VARIANT.format(key="align.loss.name")),
    "loss_weights": _same("One loss trains at a time; dpo takes a share of SFT with its setting sft."),
    "rpo_alpha": _loss("sft", "The weight of SFT on the chosen side", value="1.0"),
    "label_smoothing": _same("No loss of Perturn smooths labels; leave it out."),
    "label_smoothing_factor": _same("No loss of Perturn smooths labels; leave it out."),
    "f_divergence_type": _loss("kernel", "The divergence", "dil", "'ukl'"),
    "f_alpha_divergence_coef": _loss("alpha", "The coefficient of a divergence", "dil", "0.5"),
    "desirable_weight": _loss("desirable_weight", "The weight of desirable episodes", "kto", "1.0"),
    "undesirable_weight": _loss("undesirable_weight", "The weight of undesirable episodes", "kto", "1.0"),
    "epsilon": _loss("clip_low", "The lower clip", "ppo-clip", "0.2"),
    "epsilon_high": _loss("clip_high", "The upper clip", "ppo-clip", "0.28"),
    "delta": _loss("dual_clip", "The dual clip", "ppo-clip", "3.0"),
    "importance_sampling_level": _loss("ratio", "The level of the ratio", "ppo-clip", "'sequence'"),
    "use_weighting": _same("Weights of turns come from a credit; `perturn list credits` shows them."),
    **_each(
        "ld_alpha discopop_tau cpo_alpha simpo_gamma sapo_temperature_neg sapo_temperature_pos vespo_k_neg "
        "vespo_k_pos vespo_lambda_neg vespo_lambda_pos use_bias_correction_kl off_policy_mask_threshold "
        "top_entropy_quantile center_rewards_coefficient router_aux_loss_coef reference_free",
        _NO_VARIANT,
    ),
    **_each(
        "entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy",
        _ENTROPY,
    ),
    # The reference
    "precompute_ref_log_probs": _same(_REFERENCE),
    "precompute_ref_batch_size": Peer(
        "token_budget also bounds the pass of the reference; leave it out.",
        "align.token_budget also bounds the pass of the reference; leave it out.",
    ),
    "sync_ref_model": _SYNCED,
    "ref_model_mixup_alpha": _SYNCED,
    "ref_model_sync_steps": _SYNCED,
    "force_use_ref_model": _same("A loss that reads a reference always has one; leave it out."),
    "ref_model": Peer(
        "Give ref_model to TurnTrainer itself, not to TurnConfig.",
        "Write align.reference (previous, start or average), which says what policy is the reference.",
    ),
    # Lengths, packing, templates
    "max_prompt_length": Peer(
        _TURNS_DROPPED.format(key="max_length"), _TURNS_DROPPED.format(key="model.max_length")
    ),
    "max_length": _only_recipe("model.max_length"),
    "max_seq_length": Peer("Write max_length.", "Write model.max_length."),
    "truncation_mode": _same("Rows that are too long always lose whole turns from their end; leave it out."),
    **_each(
        "padding_free packing packing_strategy eval_packing pad_to_multiple_of group_by_length padding_value "
        "label_pad_token_id use_logits_to_keep",
        _same(_PACKED),
    ),
    "assistant_only_loss": Peer(_ACTIONS.format(key="loss_on"), _ACTIONS.format(key="sft.loss_on")),
    "completion_only_loss": Peer(_ACTIONS.format(key="loss_on"), _ACTIONS.format(key="sft.loss_on")),
    "chat_template_path": Peer("Write chat_template.", "Write model.chat_template."),
    "chat_template_kwargs": _same(
        "Give chat_template_kwargs with each row; a template without thinking is the chat template qwen3-nothink."
    ),
    "eos_token": _TOKENIZER,
    "pad_token": _TOKENIZER,
    **_each(
        "dataset_text_field dataset_kwargs dataset_num_proc is_encoder_decoder shuffle_dataset",
        _same(_OWN_ROWS),
    ),
    # The model
    "model_init_kwargs": _LOADED,
    "ref_model_init_kwargs": _LOADED,
    "trust_remote_code": _same("Code from the Hub is never run; use a model that transformers itself has."),
    "cast_lm_head_to_fp32": _same("Log-probabilities are computed in float32 already; leave it out."),
    "use_liger_kernel": Peer(
        "It is there.",
        "A recipe has none: the output layer already runs in chunks, only where a token carries loss.",
    ),
    "use_liger_loss": _same(
        "The output layer already runs in chunks, only where a token carries loss; leave it out."
    ),
    "activation_offloading": Peer(
        "Activations are not moved to the CPU; gradient_checkpointing saves their memory.",
        "Activations are not moved to the CPU; align.gradient_checkpointing saves their memory.",
    ),
    "use_peft": Peer("Give a peft_config to TurnTrainer.", "Write align.lora (and sft.lora)."),
    "peft_config": Peer("Give peft_config to TurnTrainer itself.", "Write align.lora (and sft.lora)."),
    "lora_r": Peer("Give TurnTrainer a peft_config.", "Write align.lora.rank."),
    "lora_alpha": Peer("Give TurnTrainer a peft_config.", "Write align.lora.alpha."),
    "lora_dropout": Peer("Give TurnTrainer a peft_config.", "Write align.lora.dropout."),
    "lora_target_modules": Peer("Give TurnTrainer a peft_config.", "Write align.lora.target_modules."),
    "load_in_4bit": Peer(
        "Load the model in that form and give TurnTrainer the object.",
        "A recipe loads no quantized weights; write align.lora to train few of them.",
    ),
    "load_in_8bit": Peer(
        "Load the model in that form and give TurnTrainer the object.",
        "A recipe loads no quantized weights; write align.lora to train few of them.",
    ),
    "model_name_or_path": Peer("Give the model's name to TurnTrainer itself.", "Write model.name."),
    "dtype": Peer("Load the model in that type and give TurnTrainer the object.", "Write model.dtype."),
    "torch_dtype": Peer("Load the model in that type and give TurnTrainer the object.", "Write model.dtype."),
    "attn_implementation": _same("Perturn packs rows with an attention of its own; leave it out."),
    # Playing
    "num_generations": _played("explore.samples", "number of episodes of each task"),
    "num_generations_eval": _played("evaluate.select.samples", "number of episodes of each scored task"),
    "generation_batch_size": _played("explore.per_iteration", "number of tasks of an iteration"),
    "steps_per_generation": _played(
        "align.minibatches", "number of optimizer steps on one iteration's episodes"
    ),
    "num_iterations": _played("align.epochs", "number of passes over one iteration's episodes"),
    "max_completion_length": _played("explore.sampling.max_new_tokens", "limit of a turn in tokens"),
    "max_new_tokens": _played("explore.sampling.max_new_tokens", "limit of a turn in tokens"),
    "temperature": _played("explore.sampling.temperature", "sampling temperature"),
    "top_p": _played("explore.sampling.top_p", "nucleus of sampling"),
    "max_tool_calling_iterations": _played("protocol.max_turns", "limit of an episode in turns"),
    "mask_truncated_completions": _played("rows.signals", "filter of episodes that are not trained"),
    **_each(
        "top_k min_p repetition_penalty cache_implementation generation_kwargs generate_during_eval",
        _same(
            "Actions are sampled by temperature and top_p alone, so that their log-probabilities are exact."
        ),
    ),
    **_each(
        "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config "
        "ds3_gather_for_generation",
        _same("The engine `local` batches episodes as they come; leave it out."),
    ),
    **_each(
        "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex",
        _vllm("its settings in engine"),
    ),
    "vllm_gpu_memory_utilization": _vllm("engine.options={gpu_memory_utilization: 0.5}"),
    "vllm_tensor_parallel_size": _vllm("engine.options={tensor_parallel_size: 2}"),
    "vllm_max_model_length": _vllm("engine.context"),
    **_each(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port",
        _vllm("engine.servers=[http://host:8000]"),
    ),
    "vllm_server_timeout": _vllm("engine.timeout"),
    **_each(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
        _loss("importance", "The correction of what the engine sampled with", "ppo-clip", "'token'"),
    ),
    # Rewards and advantages
    "scale_rewards": Peer(
        "Division by the standard deviation is a setting of the credit: credit={'name': 'grpo', 'normalize': 'std'}.",
        "Division by the standard deviation is a setting of the credit: credit.normalize, which grpo has.",
    ),
    "normalize_advantages": Peer(
        "Normalization is a setting of the credit: credit={'name': 'grpo', 'normalize': 'std'}.",
        "Normalization is a setting of the credit: credit.normalize, which grpo has.",
    ),
    "reward_weights": _same(_REWARDS),
    "reward_funcs": _same(_REWARDS),
    "reward_clip_range": _same(_REWARDS),
    "multi_objective_aggregation": _same(_REWARDS),
    **_each(
        "log_completions log_completions_hub_repo log_multimodal log_unique_prompts num_completions_to_print",
        _same("Every episode of a run is kept and shown in its report; leave it out."),
    ),
    # Training: names of transformers, which TurnConfig has and a recipe has not
    "per_device_train_batch_size": _only_recipe(
        "align.batch_size (or sft.batch_size), the rows of one optimizer step"
    ),
    "per_device_eval_batch_size": _only_recipe("evaluate.concurrency, the episodes played at the same time"),
    "gradient_accumulation_steps": Peer(
        "token_budget bounds the memory of a pass.",
        "There is none: a step has align.batch_size rows, and align.token_budget divides them into passes.",
    ),
    "num_train_epochs": _only_recipe("align.epochs (or sft.epochs)"),
    "max_steps": _only_recipe("align.epochs", "; it may be a part of one, such as 0.1"),
    "lr_scheduler_type": _only_recipe("align.scheduler"),
    "lr": Peer("Write learning_rate.", "Write align.learning_rate."),
    "warmup_steps": _only_recipe("align.warmup_ratio, a share of the steps"),
    "optim": _only_recipe("align.learning_rate and align.adam_beta2", "; the optimizer is always AdamW"),
    "adam_beta1": _only_recipe("align.adam_beta2", "; the other constants of AdamW are fixed"),
    "adam_epsilon": _only_recipe("align.adam_beta2", "; the other constants of AdamW are fixed"),
    "bf16": _only_recipe("model.dtype=bfloat16"),
    "fp16": _only_recipe("model.dtype=bfloat16", "; float16 is not supported"),
    "output_dir": _only_recipe("output", ", the folder of all runs, and name, the folder of this one"),
    "run_name": _only_recipe("name"),
    "logging_steps": Peer("It is there.", "Every optimizer step is logged; leave it out."),
    "save_strategy": _only_recipe("align.save_steps"),
    "save_total_limit": Peer("It is there.", "A run keeps what it needs to resume; leave it out."),
    "eval_strategy": _only_recipe("evaluate.every, in iterations"),
    "eval_steps": _only_recipe("evaluate.every, in iterations"),
    "evaluation_strategy": Peer("Write eval_strategy.", "Write evaluate.every, in iterations."),
    "resume_from_checkpoint": Peer(
        "Give it to TurnTrainer.train().", "The same command resumes by itself; leave it out."
    ),
    "deepspeed": Peer(
        "It is there.", "Write it in accelerate's config, and use `accelerate launch -m perturn train`."
    ),
    "fsdp": Peer(
        "It is there.", "Write it in accelerate's config, and use `accelerate launch -m perturn train`."
    ),
    "dataset_name": Peer(
        "Give the rows to TurnTrainer as train_dataset.", "Take rows.name=file, or expert.file."
    ),
    "train_dataset": Peer(
        "Give the rows to TurnTrainer as train_dataset.", "Take rows.name=file, or expert.file."
    ),
    "push_to_hub": Peer(
        "It is there.", "Leave it out; `perturn export RUN --to hub --repo NAME` uploads a policy."
    ),
    "hub_model_id": Peer(
        "It is there.", "Leave it out; `perturn export RUN --to hub --repo NAME` uploads a policy."
    ),
}
"""Name of the setting -> what to write instead."""
