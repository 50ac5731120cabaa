"""Write the sample files in this folder, each by the released code of its library.

    PYTHONPATH=src:tests .venv/bin/python tests/formats/rollouts/write_samples.py tokens trl
    PYTHON tests/formats/rollouts/write_samples.py verifiers verifiers-legacy art agent-lightning verl skyrl

`PYTHON` is one in which a library is installed; `SOURCE_<LIBRARY>` names a folder with its unpacked wheel instead. Of
verl and SkyRL the functions that write are run as they stand, without Ray. Every sample holds the same two rollouts of
one task: one finds the lamp and gets 1, the other does not and gets 0. Some hold a rollout that failed.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SYSTEM, TASK, SEEN = "You find things in a house.", "Find the lamp in the hall.", "You are in the hall."
PROMPT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
LASTS = {"good": ("take lamp", 1.0), "bad": ("wait", 0.0)}


def held(name: str) -> dict[str, Any]:
    """Tokens of a rollout."""
    return json.loads((HERE / "tokens.json").read_text())[name]


def answer_tokens(name: str) -> list[list[int]]:
    """Tokens of the two answers of a rollout."""
    ids, mask = held(name)["response"], held(name)["mask"]
    return [ids[: mask.index(0)], ids[len(mask) - mask[::-1].index(0) :]]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def package(name: str, module: str, *, runs_init: bool = False) -> Any:
    """Import a module of a library without running the library's own `__init__`, which may need a GPU's packages."""
    if source := os.environ.get(f"SOURCE_{name.upper()}"):
        sys.path.insert(0, source)
    if not runs_init and name not in sys.modules:
        places = [str(Path(each) / name) for each in sys.path if (Path(each) / name).is_dir()]
        stub = types.ModuleType(name)
        stub.__path__ = places
        sys.modules[name] = stub
    return importlib.import_module(module)


def released(name: str, file: str, *wanted: str, **given: Any) -> dict[str, Any]:
    """Run some definitions of a file of a library as they stand, with the names that they read."""
    source = os.environ.get(f"SOURCE_{name.upper()}")
    places = [source] if source else sys.path
    path = next(Path(each) / file for each in places if (Path(each) / file).is_file())
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in wanted
    ]
    for node in (each for each in tree.body if isinstance(each, ast.FunctionDef)):
        node.decorator_list = []
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree.body.insert(0, future)
    names = {"json": json, "os": os, "Any": Any} | given
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), names)
    return names


def tokens() -> None:
    """Tokens of the two rollouts, of SmolLM2's tokenizer with its first tokens alone."""
    import tempfile

    from perturn.chat.model_names import load_tokenizer
    from support.models import write_tiny_policy

    with tempfile.TemporaryDirectory() as place:
        folder = write_tiny_policy(Path(place) / "tiny", load_tokenizer("smollm2-135m"))
        tokenizer = load_tokenizer(str(folder))
    first = tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    between = f"\n<|im_start|>user\n{SEEN}<|im_end|>\n<|im_start|>assistant\n"
    found = {}
    for name, (last, _) in LASTS.items():
        parts = [tokenizer.encode(text) for text in ("go to hall<|im_end|>", between, f"{last}<|im_end|>")]
        mask = [at % 2 == 0 for at, part in enumerate(parts) for _ in part]
        found[name] = {
            "prompt": tokenizer.encode(first),
            "response": [each for part in parts for each in part],
            "mask": [int(each) for each in mask],
            "logprobs": [-0.25 if kept else 0.0 for kept in mask],
            "texts": [first, f"go to hall<|im_end|>{between}{last}<|im_end|>"],
        }
    (HERE / "tokens.json").write_text(json.dumps(found) + "\n")


def trl() -> None:
    """Completions of a real run of TRL's GRPOTrainer, of one step, with two reward functions."""
    import tempfile

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from perturn.chat.model_names import load_tokenizer
    from support.models import write_tiny_policy

    def even(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(each[0]["content"]) % 2) for each in completions]

    def length(completions: list[Any], **_: Any) -> list[float | None]:
        return [float(len(each[0]["content"])) for each in completions]

    with tempfile.TemporaryDirectory() as place:
        folder = write_tiny_policy(Path(place) / "tiny", load_tokenizer("smollm2-135m"))
        sizes = {
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "max_completion_length": 8,
            "max_steps": 1,
        }
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no"}
        args = GRPOConfig(place, log_completions=True, logging_steps=1, **sizes, **quiet)
        rows = Dataset.from_list([{"prompt": PROMPT}, {"prompt": [{"role": "user", "content": "Wait."}]}] * 2)
        model = AutoModelForCausalLM.from_pretrained(folder)
        GRPOTrainer(
            model, [even, length], args, rows, processing_class=AutoTokenizer.from_pretrained(folder)
        ).train()
        (written,) = Path(place).rglob("*.parquet")
        (HERE / "trl_completions.parquet").write_bytes(written.read_bytes())


def verifiers() -> None:
    """Episodes of verifiers 0.4 in `traces.jsonl`, with the tokens that a training client gives."""
    episode = package("verifiers", "verifiers.v1.episode", runs_init=True)
    trace, graph = (importlib.import_module(f"verifiers.v1.{name}") for name in ("trace", "graph"))
    agent = importlib.import_module("verifiers.v1.configs.agent")
    task = importlib.import_module("verifiers.v1.task")
    store = importlib.import_module("verifiers.v1.utils.trace_store")
    (HERE / store.TRACES_FILE).unlink(missing_ok=True)
    about = trace.TraceTask(type="Find", data=task.WireTaskData(idx=3, prompt=TASK), key="find-lamp")
    info = trace.AgentInfo(config=agent.WireAgentConfig(model="smollm2-135m"))
    for name, (last, reward) in LASTS.items():
        prompt, rest, (first, second) = held(name)["prompt"], held(name)["response"], answer_tokens(name)
        spans = [(first, []), (second, rest[len(first) : len(rest) - len(second)])]
        messages = [*PROMPT, said("go to hall"), {"role": "user", "content": SEEN}, said(last)]
        nodes = []
        for index, message in enumerate(messages):
            sampled = message["role"] == "assistant"
            given: dict[str, Any] = {"token_ids": prompt if index == 0 else []}
            if sampled:
                ids, before = spans[len(nodes) // 3]
                given = {"token_ids": [*before, *ids], "logprobs": [-0.25] * len(ids)}
                given["mask"] = [False] * len(before) + [True] * len(ids)
            else:
                given["mask"] = [False] * len(given["token_ids"])
            parent = None if index == 0 else index - 1
            nodes.append(graph.MessageNode(parent=parent, message=message, sampled=sampled, **given))
        rewards = {"found": trace.Reward(score=reward)}
        one = trace.Trace(task=about, agent=info, nodes=nodes, rewards=rewards, ok=True, is_completed=True)
        store.write_episode(HERE, episode.Episode(task=about, traces=[one], ok=True))
    error = trace.Error(type="SandboxError", message="the box went away")
    store.write_episode(HERE, episode.Episode(task=about, errors=[error]))


def verifiers_legacy() -> None:
    """Rows of `results.jsonl` of verifiers 0.3.1, with the column `trajectory`."""
    saving = package("verifiers", "verifiers.legacy.utils.save_utils", runs_init=True)
    kinds = importlib.import_module("verifiers.legacy.types")
    errors = importlib.import_module("verifiers.legacy.errors")
    outputs = []
    for name, (last, reward) in LASTS.items():
        both = [said("go to hall"), {"role": "user", "content": SEEN}, said(last)]
        asked = [(PROMPT, both[:1]), ([*PROMPT, *both[:2]], both[2:])]
        trajectory = [
            {
                "prompt": prompt,
                "completion": completion,
                "response": None,
                "tokens": {"completion_ids": own, "completion_logprobs": [-0.25] * len(own)},
                "reward": reward,
            }
            for (prompt, completion), own in zip(asked, answer_tokens(name), strict=True)
        ]
        known = {"input": {"prompt": PROMPT, "example_id": 3, "answer": "lamp"}, "completion": both}
        ended = {
            "reward": reward,
            "metrics": {"steps": 2.0},
            "is_completed": True,
            "timing": kinds.RolloutTiming(),
        }
        state = kinds.State(known | ended | {"trajectory": trajectory})
        outputs.append(saving.state_to_output(state, ["trajectory"]))
    failed = {
        "input": {"prompt": PROMPT, "example_id": 3},
        "completion": [],
        "error": errors.ToolError("no tool"),
    }
    outputs.append(saving.state_to_output(kinds.State(failed | {"timing": kinds.RolloutTiming()})))
    (HERE / "results.jsonl").unlink(missing_ok=True)
    saving.save_outputs(outputs, HERE)


def art() -> None:
    """A Parquet file of trajectory groups, and trajectories with log-probabilities, of ART."""
    trajectories = package("art", "art.trajectories")
    logging = importlib.import_module("art.utils.trajectory_logging")
    found = []
    for name, (last, reward) in LASTS.items():
        choices = [
            {
                "finish_reason": "stop",
                "index": 0,
                "message": said(text),
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{each}", "logprob": -0.25, "bytes": None, "top_logprobs": []}
                        for each in own
                    ]
                },
            }
            for text, own in zip(("go to hall", last), answer_tokens(name), strict=True)
        ]
        messages = [*PROMPT, choices[0], {"role": "user", "content": SEEN}, choices[1]]
        found.append(trajectories.Trajectory(messages_and_choices=messages, reward=reward))
    (HERE / "art_trajectories.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in found))
    logging.write_trajectory_groups_parquet(
        [trajectories.TrajectoryGroup(found)], HERE / "art_groups.parquet"
    )


def agent_lightning() -> None:
    """Events of agent-lightning 1.0, and spans of 0.3."""
    if source := os.environ.get("SOURCE_AGENTLIGHTNING_1"):
        sys.path.insert(0, f"{source}/agentlightning")
        (HERE / "agent_lightning_events.jsonl").write_text(
            "".join(_events(importlib.import_module("schemas").Event))
        )
    tracer = package("agentlightning", "agentlightning.types.tracer")
    lines = []
    for number, (name, (last, reward)) in enumerate(LASTS.items()):
        both = [
            (PROMPT, "go to hall"),
            ([*PROMPT, said("go to hall"), {"role": "user", "content": SEEN}], last),
        ]
        for sequence, (asked, answer) in enumerate(both):
            attributes: dict[str, Any] = {"gen_ai.request.model": "smollm2-135m"}
            for index, message in enumerate(asked):
                attributes |= {f"gen_ai.prompt.{index}.{key}": value for key, value in message.items()}
            attributes |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": answer}
            attributes["response_token_ids"] = answer_tokens(name)[sequence]
            lines.append((number, sequence, "openai.chat.completion", attributes))
        paid = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": reward}
        lines.append((number, 2, "agentlightning.annotation", paid))
    spans = [
        tracer.Span(
            rollout_id=f"ro-{number}",
            attempt_id="at-1",
            sequence_id=sequence,
            trace_id=f"{number:032x}",
            span_id=f"{10 * number + sequence + 1:016x}",
            parent_id=None,
            name=name,
            status=tracer.TraceStatus(status_code="OK"),
            attributes=attributes,
            events=[],
            links=[],
            start_time=1000.0 + sequence,
            end_time=1000.5 + sequence,
            context=None,
            parent=None,
            resource=tracer.OtelResource(attributes={}, schema_url=""),
        )
        for number, sequence, name, attributes in lines
    ]
    (HERE / "agent_lightning_spans.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in spans))


def _events(event: Any) -> list[str]:
    """Events of two rollouts, as lines."""
    lines = []
    for number, (name, (last, reward)) in enumerate(LASTS.items()):
        asked = list(PROMPT)
        for answer, own in zip(("go to hall", last), answer_tokens(name), strict=True):
            content = [{"token": "", "logprob": -0.25} for _ in own]
            choice = {
                "message": said(answer),
                "finish_reason": "stop",
                "token_ids": own,
                "logprobs": {"content": content},
            }
            data = {
                "model": "smollm2-135m",
                "request": {"messages": asked},
                "response": {"choices": [choice]},
                "status": "ok",
            }
            lines.append(("model_request", number, dict(data)))
            asked = [*asked, said(answer), {"role": "user", "content": SEEN}]
        lines.append(("reward", number, {"value": reward}))
    return [
        event(
            event_type=kind, rollout_id=f"ro-{number}", attempt_id="0", timestamp=1000.0 + at, data=data
        ).model_dump_json()
        + "\n"
        for at, (kind, number, data) in enumerate(lines)
    ]


def verl() -> None:
    """Dumped generations and outputs of an agent loop, of verl."""
    from pydantic import BaseModel

    names = released("verl", "verl/trainer/ppo/ray_trainer.py", "_dump_generations", "_write_generations")
    trainer = types.SimpleNamespace(
        global_steps=7,
        _dump_executor=ThreadPoolExecutor(1),
        _dump_futures=[],
        _write_generations=names["_write_generations"],
    )
    asked = f"system\n{SYSTEM}\nuser\n{TASK}\nassistant\n"
    said_all = [f"go to hall\nuser\n{SEEN}\nassistant\n{last}" for last, _ in LASTS.values()]
    scores = [reward for _, reward in LASTS.values()]
    extra = {"acc": scores, "uid": ["a", "a"]}
    names["_dump_generations"](trainer, [asked] * 2, said_all, ["lamp"] * 2, scores, extra, str(HERE))
    trainer._dump_executor.shutdown()
    (HERE / "7.jsonl").rename(HERE / "verl_rollouts.jsonl")
    kinds = released(
        "verl",
        "verl/experimental/agent_loop/agent_loop.py",
        *("AgentLoopMetrics", "AgentLoopOutput"),
        BaseModel=BaseModel,
        Optional=__import__("typing").Optional,
    )
    for name in ("AgentLoopMetrics", "AgentLoopOutput"):
        kinds[name].model_rebuild(_types_namespace=kinds)
    lines = []
    for name, (_, reward) in LASTS.items():
        ids = held(name)
        lists = {
            "prompt_ids": ids["prompt"],
            "response_ids": ids["response"],
            "response_mask": ids["mask"],
            "response_logprobs": ids["logprobs"],
        }
        one = kinds["AgentLoopOutput"](
            **lists, reward_score=reward, num_turns=5, metrics={}, extra_fields={"uid": "a"}
        )
        lines.append(f"{one.model_dump_json()}\n")
    (HERE / "verl_agent_loop.jsonl").write_text("".join(lines))


def skyrl() -> None:
    """A dumped evaluation, and outputs of a generator with rewards for each token, of SkyRL."""
    file = "skyrl/train/utils/trainer_utils.py"
    quiet = types.SimpleNamespace(info=lambda text: None)
    names = released(
        "skyrl", file, "dump_per_dataset_eval_results", "sanitize_data_source", logger=quiet, Path=Path
    )
    decode = {
        json.dumps(held(name)[key]): held(name)["texts"][at]
        for name in LASTS
        for at, key in enumerate(("prompt", "response"))
    }
    tokenizer = types.SimpleNamespace(decode=lambda ids: decode[json.dumps(ids)])
    output: dict[str, Any] = {
        "prompt_token_ids": [held(name)["prompt"] for name in LASTS],
        "response_ids": [held(name)["response"] for name in LASTS],
        "rewards": [_at_end(held(name)["mask"], reward) for name, (_, reward) in LASTS.items()],
        "loss_masks": [held(name)["mask"] for name in LASTS],
        "stop_reasons": ["stop", "length"],
        "rollout_metrics": None,
        "rollout_logprobs": [held(name)["logprobs"] for name in LASTS],
        "trajectory_ids": [{"instance_id": "find-lamp", "repetition_id": at} for at in range(2)],
    }
    place = HERE / "skyrl"
    place.mkdir(exist_ok=True)
    names["dump_per_dataset_eval_results"](
        place, tokenizer, output, ["house"] * 2, ["find"] * 2, [{}] * 2, {}
    )
    (place / "house.jsonl").rename(HERE / "skyrl_evaluation.jsonl")
    (place / "aggregated_results.jsonl").unlink()
    place.rmdir()
    (HERE / "skyrl_generated.json").write_text(json.dumps(output) + "\n")


def _at_end(mask: list[int], reward: float) -> list[float]:
    """Rewards of tokens: 0.25 at the end of the first turn, and the rest at the last token."""
    first = mask.index(0) - 1
    return [0.25 if at == first else reward - 0.25 if at == len(mask) - 1 else 0.0 for at in range(len(mask))]


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        globals()[wanted.replace("-", "_")]()
