"""Several processes give the loss curve, the metrics, the evaluation and the policy of one."""

import json
import os
import signal

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.errors import ConfigError
from support.ports import free_port
from support.processes import Started

SCRIPT = """
import json, os, sys

import torch
from safetensors.torch import save_file
from dataclasses import replace
from perturn import TurnConfig, TurnTrainer
from perturn.formats.trl_rows import from_trl
from perturn.policy.models import load_model
from perturn.chat.model_names import load_tokenizer
from perturn.types import Action, WeightedTrajectory

folder, output, cases = *sys.argv[1:3], json.loads(sys.argv[3])
tokenizer = load_tokenizer(folder)
BATCH = 4
SAMPLED = {"name": "ppo-clip", "ratio": "turn", "aggregate": "turn_mean", "kl": 0.1, "importance": "turn"}


def pair(i):
    question, answer = {"role": "user", "content": "go"}, {"role": "assistant", "content": "on " * (1 + i)}
    return {
        "prompt": [{"role": "user", "content": "look " * (i % 5)}],
        "chosen": [{"role": "assistant", "content": f"north {i}"}, *[question, answer] * (i % 3)],
        "rejected": [{"role": "assistant", "content": f"south {i} " * (1 + 3 * i % 11)}],
    }


def sampled(i):
    made = from_trl({"messages": [*pair(i)["prompt"], *pair(i)["chosen"]]}, task_id=f"t/{i // 2}")
    actions = [
        Action(turn.action.text, ids, (-4.0 - i % 3,) * len(ids))
        for turn in made.turns
        for ids in [(*tokenizer(turn.action.text)["input_ids"], tokenizer.eos_token_id)]
    ]
    turns = [replace(turn, action=action) for turn, action in zip(made.turns, actions, strict=True)]
    spread = i % 4 != 3
    weight = tuple((-1.0) ** (i + t) * spread for t in range(len(turns)))
    return WeightedTrajectory(replace(made, turns=tuple(turns)), weight, has_spread=spread)


def labelled(i):
    made = from_trl({"messages": [*pair(i)["prompt"], *pair(i)["chosen"]]}, task_id=f"t/{i}")
    return WeightedTrajectory(made, ((-1.0) ** (i % 3),) * len(made.turns))


def run(name, world, rank, *, budgets, pairs=7, evaluated=3, resume=None, **settings):
    args = TurnConfig(
        output_dir=f"{output}/{name}-{world}", use_cpu=True, report_to=[], disable_tqdm=True, seed=3, ddp_timeout=40,
        reference_cache=f"{output}/cache-{world}-{rank}", learning_rate=0.05, optim="sgd", num_train_epochs=2,
        token_budget=budgets[world > 1], per_device_train_batch_size=BATCH // world,
        per_device_eval_batch_size=BATCH // world, eval_strategy="epoch",
        **{"logging_steps": 1, "save_strategy": "no", **settings},
    )
    reference = load_model(folder)
    torch._foreach_mul_(list(reference.state_dict().values()), 1.05)
    row = sampled if settings["loss"] == SAMPLED else labelled if settings["loss"] == "kto" else pair
    rows = [row(i) for i in range(pairs)], [row(20 + i) for i in range(evaluated)]
    trainer = TurnTrainer(folder, args, *rows, ref_model=reference)
    trainer.train(resume_from_checkpoint=resume and f"{output}/{resume[0]}-{world}/checkpoint-{resume[1]}")
    if trainer.is_world_process_zero():
        with open(f"{output}/{name}-{world}.json", "w") as file:
            json.dump(trainer.state.log_history, file)
        weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        save_file(weights, f"{output}/{name}-{world}.safetensors")
    trainer.accelerator.wait_for_everyone()


def work(rank, world, port):
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }
    for name, case in cases.items():
        if world in case.pop("worlds"):
            run(name, world, rank, **case)
    os._exit(0)  # gloo's threads sometimes abort the interpreter on its way out


for world, port in zip((1, 2, 4), sys.argv[4:]):
    torch.multiprocessing.start_processes(work, (world, port), nprocs=world, start_method="fork")
"""

COUPLED = {"name": "tlm-dre", "coefficient": "self_normalized", "reduction": "turn_mean", "pivot": 0}
CASES = {
    "coupled": {
        "loss": COUPLED,
        "budgets": (4096, 120),
        "worlds": (1, 2, 4),
        "save_strategy": "steps",
        "save_steps": 3,
    },
    "accumulated": {
        "loss": "dpo",
        "budgets": (1, 140),
        "worlds": (1, 2, 4),
        "pairs": 13,
        "evaluated": 9,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "logging_steps": 3,
    },
    "resumed": {"loss": COUPLED, "budgets": (4096, 120), "worlds": (1, 2), "resume": ("coupled", 3)},
    "sft": {"loss": "sft", "budgets": (4096, 60), "worlds": (1, 2), "pairs": 9, "evaluated": 1},
    "sampled": {
        "loss": {
            "name": "ppo-clip",
            "ratio": "turn",
            "aggregate": "turn_mean",
            "kl": 0.1,
            "importance": "turn",
        },
        "budgets": (4096, 60),
        "worlds": (1, 2, 4),
        "pairs": 9,
        "evaluated": 3,
        "episodes": 12,
    },
    "unpaired": {"loss": "kto", "budgets": (4096, 60), "worlds": (1, 2), "pairs": 7, "evaluated": 3},
    "dropped": {
        "loss": "sft",
        "budgets": (60, 4096),
        "worlds": (1, 2),
        "pairs": 6,
        "dataloader_drop_last": True,
    },
}
"""What is trained, by the budgets of one process and of several; a batch is four pairs in each."""
FAST = ("coupled", "accumulated", "resumed", "sampled", "dropped")
"""The others are slow: one-sided rows are in `sampled` too, and a loss that couples its rows is that of `coupled`."""

CLOCK = ("runtime", "per_second", "preparation_time")


def train(folder, output, names, *worlds):
    """Let one process, and as many as are said, log and learn cases; each number of them after one fork."""
    (output / "script.py").write_text(SCRIPT)
    cases = {name: CASES[name] | {"worlds": {*CASES[name]["worlds"]} & {1, *worlds}} for name in names}
    ports = [free_port() for _ in range(3)]
    written = json.dumps(cases, default=sorted)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    script = Started(
        [str(folder), str(output), written, *ports], output, environment, str(output / "script.py")
    )
    try:
        _, errors = script.communicate(timeout=300)
        assert script.returncode == 0, errors
    finally:
        if script.poll() is None:  # a deadlock: its processes wait for each other for ever
            os.killpg(script.pid, signal.SIGKILL)
    return output


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory):
    """The folder of what one process and two logged and learned."""
    return train(tiny_folder, tmp_path_factory.mktemp("distributed"), FAST, 2)


@pytest.fixture(scope="module")
def trained_by_four(tiny_folder, tmp_path_factory):
    """The folder of what one process, two and four logged and learned."""
    return train(tiny_folder, tmp_path_factory.mktemp("distributed"), CASES, 2, 4)


def entries(trained, name, world):
    """Log entries without what the clock says."""
    logged = json.loads((trained / f"{name}-{world}.json").read_text())
    return [{k: v for k, v in entry.items() if not k.endswith(CLOCK)} for entry in logged]


@pytest.mark.parametrize("name", FAST)
def test_two_processes_give_the_log_and_the_policy_of_one(trained, name):
    """Every entry of every metric, and the weights; sums over pairs in another order differ by rounding alone.

    Batches that end unevenly, lengths and budgets that give the processes unequal packs, accumulation, clipping,
    evaluation of fewer rows than there are processes, a loss that couples its pairs, a resumed run, dropped rows.
    """
    assert_same_as_of_one(trained, name, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world"),
    [
        (name, world)
        for name, case in CASES.items()
        for world in case["worlds"][1:]
        if world == 4 or name not in FAST
    ],
)
def test_more_cases_and_four_processes_give_the_log_and_the_policy_of_one(trained_by_four, name, world):
    """Four have fewer rows in a batch than two a process."""
    assert_same_as_of_one(trained_by_four, name, world)


def assert_same_as_of_one(trained, name, world):
    """Every entry of every metric, and the weights, are those of one process."""
    one, several = entries(trained, name, 1), entries(trained, name, world)

    assert [set(entry) for entry in several] == [set(entry) for entry in one]
    for mine, other in zip(several, one, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert_close(
        load_file(trained / f"{name}-{world}.safetensors"),
        load_file(trained / f"{name}-1.safetensors"),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_in_the_middle_of_an_epoch_continues_the_run(trained, world):
    """Saved after three steps of four, in the second epoch, whose order differs from the first's."""
    whole, resumed = (
        [e["loss"] for e in entries(trained, n, world) if "loss" in e] for n in ("coupled", "resumed")
    )

    assert len(whole) == 4
    assert resumed == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_the_effective_batch_is_that_of_the_optimizer_step(trained, world):
    """Four pairs and then three, however many processes and packs they are divided among: more than two count."""
    sizes = [entry["effective_batch_size"] for entry in entries(trained, "coupled", world) if "loss" in entry]

    assert all(low < size <= high for size, low, high in zip(sizes, (2, 2) * 2, (4, 3) * 2, strict=True))


def test_a_process_that_sees_several_gpus_is_rejected_before_the_reference_pass(make_trainer, monkeypatch):
    """With both ways out; the rows are not even encoded."""
    monkeypatch.setattr("perturn.TurnConfig.n_gpu", 2)
    monkeypatch.setattr("perturn.TurnTrainer._encode", lambda *_: pytest.fail("rows were encoded"))

    with pytest.raises(ConfigError, match=r"sees 2 GPUs.*CUDA_VISIBLE_DEVICES=0.*--num_processes 2"):
        make_trainer([])
