"""Memory of a training by formula: parts worked by hand, what fits on a GPU, and one measured training."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.sections import Base, Launch, Lora, Train
from perturn.config.stages import stages
from perturn.estimate.dry_run import make_plan
from perturn.estimate.fit import ACCURACY, Gpus, Training, engine_bytes, remedies, say_fit
from perturn.estimate.memory import ModelShape, cache_bytes, model_shape, training_memory
from perturn.estimate.overlap import side_by_side
from perturn.policy.lora_adapters import lora_config
from perturn.policy.models import add_adapters, empty_model
from support.benchmarks import benchmark

SHAPE = ModelShape(
    parameters=1_000_000,
    vocabulary=1000,
    hidden=100,
    layers=9,
    mlp=300,
    query=100,
    key=50,
    heads=10,
    tied=True,
)
SEVEN = ModelShape(
    parameters=7_615_616_512,
    vocabulary=152_064,
    hidden=3584,
    layers=28,
    mlp=18_944,
    query=3584,
    key=512,
    heads=28,
    tied=False,
)
"""Qwen2.5-7B."""
PASS = {"tokens": 10, "loss_tokens": 4, "compute_bytes": 4, "device": "cpu"}


def training(**settings):
    """A training of a 7B model on rows of 4000 tokens."""
    return Training(SEVEN, Train({"name": "dpo"}, **settings), Launch(), 100, 4000.0, 0.3, 2)


def test_parts_are_worked_by_hand():
    """16 bytes a parameter; a layer keeps 16 + 8 + 12 hidden states, 2 * (100 + 50) of attention and 4 * 300 of it."""
    found = training_memory(SHAPE, **PASS)
    layer = 4 * (4 * 100 + 2 * 100 + 2 * 100 + 2 * 50 + 10 + 4 * 300)

    assert (found.weights, found.gradients, found.optimizer) == (4e6, 4e6, 8e6)
    assert found.activations == 10 * 8 * layer + 4 * layer + 10 * 8 * 100
    assert found.logits == 4 * 4000 + 2 * 4 * 4000 + 4 * 800 + 4 * 100_000
    assert (found.copies, found.gathered, found.host) == (0, 0, 0)
    ends = found.gradients + 2 * 4 * 100_000
    begins = found.gradients + found.activations + found.logits
    assert found.peak == found.weights + found.optimizer + max(ends, begins)


def test_one_pass_a_step_holds_no_gradients_beside_its_activations():
    """They are made while the activations go."""
    once, twice = (training_memory(SHAPE, **{**PASS, "tokens": 10_000}, passes=n) for n in (1, 2))

    assert twice.peak - once.peak == once.gradients


def test_processes_hold_a_part_each():
    """FSDP2 divides 16 bytes a parameter, in the memory of the machine if asked; whole copies exchange gradients."""
    one = training_memory(SHAPE, **PASS)
    divided, copies = (training_memory(SHAPE, **PASS, processes=4, sharding=how) for how in ("fsdp2", "none"))
    offloaded = training_memory(
        SHAPE, **{**PASS, "device": "cuda"}, processes=4, sharding="fsdp2", cpu_offload=True
    )

    for name in ("weights", "gradients", "optimizer"):
        assert getattr(divided, name) == getattr(one, name) / 4
        assert getattr(copies, name) == getattr(one, name)
        assert getattr(offloaded, name) == 0
    assert copies.gathered == one.gradients
    assert offloaded.host == 4e6
    assert offloaded.peak < divided.peak


def test_a_reference_is_computed_with_the_whole_model_on_a_gpu():
    """By each process; without one, FSDP2 divides the model before it is on the GPU."""
    how = {"tokens": 10, "processes": 8, "sharding": "fsdp2"}
    reads, none = (training_memory(SEVEN, **how, reads_reference=reads) for reads in (True, False))

    assert reads.start > 6 * SEVEN.parameters - 2 * SEVEN.embedding
    assert none.start == 0
    adapters = {"tokens": 10, "adapters": SEVEN.adapters(16), "checkpointing": True}
    assert training_memory(SEVEN, **adapters).peak == training_memory(SEVEN, **adapters).start


def test_frozen_weights_take_no_gradients():
    """Nor moments; in float32, and in bfloat16 with FSDP2. Checkpointing keeps no copies of them."""
    adapters = SEVEN.adapters(16)
    whole, divided = (
        training_memory(SEVEN, tokens=10, adapters=adapters, processes=2, sharding=how)
        for how in ("none", "fsdp2")
    )
    checkpointed = training_memory(SEVEN, tokens=10, adapters=adapters, checkpointing=True)

    assert whole.gradients == 4 * adapters
    assert whole.weights == 4 * (SEVEN.parameters + adapters)
    assert divided.weights == SEVEN.parameters + 2 * adapters
    assert whole.copies > 13e9 > 2e9 > checkpointed.copies


def test_sizes_of_a_model_are_read_without_its_weights(tiny_folder):
    """And adapters are counted as peft makes them."""
    model = empty_model(str(tiny_folder))
    shape = model_shape(model)
    adapted = add_adapters(empty_model(str(tiny_folder)), lora_config(Lora(rank=4)), 0)

    assert shape.parameters == sum(each.numel() for each in model.parameters())
    assert shape.adapters(4) == sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert cache_bytes(SEVEN, 2) == 57_344


def test_fewest_changes_come_first_and_more_than_enough_is_left_out():
    found = remedies(training(), 80e9)

    assert "lora={rank: 16}" in found
    assert "launch={processes: 8, sharding: fsdp2}" in found
    assert found == sorted(found, key=lambda words: words.count(" and "))
    assert not any("lora" in words and " and " in words for words in found)
    assert not any("processes: 16" in words for words in found)
    assert remedies(training(), 1e9) == []


def test_a_setting_that_is_there_is_no_remedy():
    """Nor is LoRA where weights are made from nothing."""
    found = remedies(training(gradient_checkpointing=True, lora=Lora()), 24e9)

    assert found
    assert not any("lora" in words or "checkpointing" in words for words in found)
    assert not any("lora" in words for words in remedies(replace(training(), settings=Base()), 80e9))


def test_a_prediction_is_marked_and_says_what_would_fit():
    """The size of the GPU decides; where it is not known, the need of each process is all that is said."""
    wide, fits = (
        say_fit("align", training(), Gpus(80.0)),
        say_fit("align", training(lora=Lora()), Gpus(141.0)),
    )
    unknown, known = say_fit("align", training(), Gpus(None))

    assert wide[1] is False
    assert wide[0].startswith("Prediction: align needs ")
    assert "It does not fit in 80 GB. Each of these would make it fit: launch={processes: 8" in wide[0]
    assert fits[1] is True
    assert fits[0].endswith(", and fits in 141 GB.")
    assert known is True
    assert "fit" not in unknown
    assert say_fit("align", training(), Gpus(1.0))[0].endswith("in 1 GB, with no setting that was tried.")
    beside = say_fit("align", training(lora=Lora()), Gpus(80.0), engine=20e9)
    assert "the engine on the same GPU holds 20.0" in beside[0]
    assert beside[1] is False


@pytest.mark.slow
def test_a_dry_run_has_the_need_of_each_process(recipe):
    """Of the two trainings of the recipe; a GPU of 0.1 GB has no room for a process."""
    two = ["launch={processes: 2, sharding: fsdp2}"]
    plan, small = (make_plan(recipe, two, "train", gpu_gb=size) for size in (80.0, 0.1))

    assert [step.processes for step in plan.steps] == [2, 2]
    said = [line for line in plan.how if line.startswith("Prediction: ")]
    assert [line.split(" ")[1] for line in said[:2]] == ["sft", "align"]
    assert all("of each of 2 GPUs" in line and line.endswith("fits in 80 GB.") for line in said[:2])
    assert "2 processes share the passes" in said[2]
    assert ACCURACY in plan.how
    assert plan.too_large == []
    assert [line.partition(" needs")[0] for line in small.too_large] == [
        "Prediction: sft",
        "Prediction: align",
    ]


def test_an_engine_that_leaves_no_room_is_named():
    """What fits without the engine is no question of the training's settings alone."""
    said, fits = say_fit("align", training(lora=Lora()), Gpus(80.0), engine=72e9)

    assert fits is False
    assert "It would fit without the engine: take engine.name=vllm with engine.sleep=true" in said
    beside, _ = say_fit("align", training(), Gpus(80.0), engine=75e9)
    assert "It would fit without the engine, with " in beside


def test_a_training_of_few_bytes_is_not_divided_into_parts():
    """Nor is an engine of few bytes named."""
    small = ModelShape(1000, 10, 10, 1, 10, 10, 10, 1, True)
    said, _ = say_fit("sft", replace(training(), shape=small), Gpus(80.0), engine=1e6)

    assert said == "Prediction: sft needs 0.5 GB of a GPU, and fits in 80 GB."


@pytest.mark.parametrize(
    ("engine", "share"),
    [
        ({}, 0.9),
        ({"sleep": True}, 0.0),
        ({"options": {"gpu_memory_utilization": 0.6}}, 0.6),
        ({"servers": ["http://gpu1:8000"]}, 0.0),
    ],
)
def test_vllm_holds_its_share_of_a_gpu_unless_it_sleeps(engine, share, tmp_path):
    """It takes the share when it starts, whatever the model needs; servers have GPUs of their own."""
    data = benchmark("staleness")._recipe("shared", tmp_path, 0)
    recipe = parse(Recipe, data | {"engine": {"name": "vllm", **engine}})
    stage = next(stage for stage in stages(recipe) if stage.section == "align")
    found = SimpleNamespace(
        prompt=1, heard=1, said=1, explore=1, policy_turns=lambda learned: 1, policy_said=lambda: 1
    )

    assert engine_bytes(recipe, stage, found, training(), Gpus(80.0)) == share * 80e9


def test_adapters_that_add_up_are_counted_with_the_rank_of_the_last_iteration(tmp_path):
    """Without minibatches, three iterations of rank 16 end with rank 48; servers get whole models."""
    data = benchmark("staleness")._recipe("added", tmp_path, 0)
    data |= {"iterations": 3, "align": data["align"] | {"lora": {"rank": 16}, "minibatches": None}}
    here = side_by_side(parse(Recipe, data), SEVEN)[-1]
    servers = {"name": "vllm", "servers": ["http://gpu1:8000"]}
    far = side_by_side(parse(Recipe, data | {"engine": servers, "staleness": 0}), SEVEN)[-1]

    assert "each iteration passes up to 0.48 GB of adapters to the engine" in here
    assert "each iteration passes 30 GB of weights to the engine" in far


def test_an_online_run_hands_over_adapters_where_it_trains_adapters(tmp_path):
    """4 bytes a parameter, of all weights or of the adapters."""
    data = benchmark("staleness")._recipe("handed", tmp_path, 0)
    whole, adapters = (
        side_by_side(parse(Recipe, data | {"align": data["align"] | lora}), SEVEN)[-1]
        for lora in ({}, {"lora": {"rank": 16}})
    )

    assert "each iteration passes 30 GB of weights to the engine" in whole
    assert "each iteration passes 0.16 GB of adapters to the engine" in adapters


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (
            "0.5B",
            Qwen2Config(
                vocab_size=151_936,
                hidden_size=896,
                num_hidden_layers=24,
                intermediate_size=4864,
                num_attention_heads=14,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            ),
        ),
        (
            "70B",
            LlamaConfig(
                vocab_size=128_256,
                hidden_size=8192,
                num_hidden_layers=80,
                intermediate_size=28_672,
                num_attention_heads=64,
                num_key_value_heads=8,
            ),
        ),
    ],
)
def test_sizes_that_are_predicted_are_the_models(size, config):
    """And the formula counts 16 bytes for each trained parameter, and 2 for its copy in bfloat16."""
    with torch.device("meta"):
        shape = model_shape(AutoModelForCausalLM.from_config(config))
    found = training_memory(shape, tokens=8192)

    assert shape == ModelShape(*benchmark("memory").PREDICTED[size])
    assert found.weights + found.gradients + found.optimizer == 16 * shape.parameters
    assert found.copies == 2 * (shape.parameters - (0 if shape.tied else shape.embedding))
    assert found.peak > 18 * shape.parameters - 2 * shape.embedding


def test_the_docs_have_the_predictions_of_the_formula():
    """From 0.5B to 70B; the text says that nothing has checked them."""
    text = (Path(__file__).parents[2] / "docs/how-to/estimate.md").read_text(encoding="utf-8")
    shown = text.partition(
        "The next table has **predictions** of the formula, which no measurement has checked"
    )[2]
    rows = benchmark("memory").predictions()

    assert {row["size"] for row in rows} == {"0.5B", "7B", "70B"}
    assert all(f"| {' | '.join(map(str, row.values()))} |" in shown for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("case", [{}, {"checkpointing": True}, {"rank": 16}])
def test_the_formula_is_near_the_bytes_of_a_training(case, tmp_path):
    """Tensors of two steps of a model of 5M parameters, counted one by one."""
    memory = benchmark("memory")
    found = memory.measure(tmp_path, memory.Case("5M", 8, **case))

    assert found["formula"]["peak"] == pytest.approx(found["used"], rel=0.15)
