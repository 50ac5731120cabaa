"""Compare training through a service of the Tinker API with training the same adapters in this process.

    python benchmarks/remote_training.py --url http://localhost:8000 --model MODEL --pairs RUN/pairs.jsonl --json

The comparison needs a SkyRL 0.3 server with the same model in float32, from which adapters can be downloaded. It also
needs pairs whose rejected sides were sampled. It prints the time of 20 steps at the service, and the largest
differences:

- of log-probabilities under equal weights;
- of the gradient of each loss with respect to log-probabilities, which is sent to the service;
- of log-probabilities after 20 steps of tlm-dre from the same adapters.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
import time
import urllib.request
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from perturn import TurnConfig, TurnTrainer
from perturn.backends.tinker.remote_policy import RemotePolicy
from perturn.backends.tinker.service_trainer import service_batch
from perturn.backends.tinker.service_training import ServiceTraining
from perturn.backends.tinker.settings import TinkerSettings
from perturn.config.sections import Lora
from perturn.data.store import read_pairs
from perturn.losses import LOSSES
from perturn.policy.logprobs import action_logprobs
from perturn.policy.models import load_model
from perturn.policy.packing import Batch, both_sides
from perturn.remaining import Remaining
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory

LORA = Lora(rank=8)
STEPS = 20


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="address of the server")
    parser.add_argument("--model", required=True, help="folder of the model, the server's base model")
    parser.add_argument("--pairs", required=True, type=Path, help="pairs whose rejected sides were sampled")
    parser.add_argument("--rows", type=int, default=4, help="pairs to use")
    parser.add_argument("--json", action="store_true", help="one line for machines")
    options = parser.parse_args()
    pairs = [_measured(pair) for pair in read_pairs(options.pairs)][: options.rows]
    found = measure(options.url, options.model, pairs)
    print(
        json.dumps(found) if options.json else "\n".join(f"{name}: {value}" for name, value in found.items())
    )


def measure(url: str, model: str, pairs: list[PreferencePair]) -> dict[str, Any]:
    """Train on both sides, and compare them."""
    training = ServiceTraining(TinkerSettings(base_url=url), model)
    with tempfile.TemporaryDirectory() as place:
        remote = _remote(training, model, pairs, place, "tlm-dre", STEPS)
        here = _here(_download(url, remote.policy, place), model, pairs, place)
        pack = service_batch(remote.train_dataset.rows)["packs"][0]
        began = time.monotonic()
        remote.train()
        seconds = time.monotonic() - began
        here.train()
        apart = _largest(_of_service(remote.policy, pack), _of_model(here.model, pack))
        moved = _largest(_of_service(remote.policy, pack), pack["reference"])
        equal = _download(url, remote.policy, place)
        gradients = {
            name: _gradient_difference(training, remote.policy, equal, model, pairs, place, name)
            for name in LOSSES
        }
        found = {
            "convention": str(remote.policy.convention),
            "tokens": len(pack["reference"]),
            "equal_weights": _largest(_of_service(remote.policy, pack), _of_model(equal, pack)),
            "after_20_steps": apart,
            "moved_by": moved,
            "seconds_of_20_steps": round(seconds, 1),
            "gradients": gradients,
        }
    training.close()
    return found


def _remote(training: Any, model: str, rows: list[Any], place: str, loss: str, steps: int) -> Any:
    """Return a trainer of new adapters at the service."""
    policy, tokenizer = training.begin(model, (), 0, LORA, False)
    settings: Any = {"train_dataset": rows, "processing_class": tokenizer}
    return training.trainer(policy, None, LORA, args=_config(place, loss, steps), **settings)


def _here(model: Any, name: str, rows: list[Any], place: str) -> TurnTrainer:
    """Return a trainer of the same adapters in this process."""
    return TurnTrainer(model, _config(place, "tlm-dre", STEPS), rows, ref_model=name)


def _config(place: str, loss: str, steps: int) -> TurnConfig:
    quiet: Any = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }
    how: Any = {
        "max_steps": steps,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0.0,
    }
    return TurnConfig(output_dir=place, loss=loss, reference_cache=f"{place}/reference", **how, **quiet)


def _download(url: str, policy: RemotePolicy, place: str) -> Any:
    """Return a local model with the adapters that a policy has at SkyRL's server."""
    client, name = policy._adapter._client, f"x{uuid.uuid4().hex[:8]}"
    policy._service.wait(client.save_weights_for_sampler(name), "adapters")
    with urllib.request.urlopen(
        f"{url}/api/v1/training_runs/{client.model_id}/checkpoints/{name}/download"
    ) as found:
        folder = Path(place) / name
        with tarfile.open(fileobj=io.BytesIO(found.read())) as archive:
            archive.extractall(folder, filter="data")
    (config,) = folder.rglob("adapter_config.json")
    # SkyRL does not record which modules have adapters, and peft's default would choose only a few.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": "all-linear"}))
    return PeftModel.from_pretrained(load_model(policy._stored.base), str(config.parent), is_trainable=True)


def _gradient_difference(
    training: Any, policy: RemotePolicy, equal: Any, model: str, pairs: list[Any], place: str, name: str
) -> float:
    """Return the largest difference between gradients with respect to log-probabilities, at the service and locally."""
    remote = _remote(training, model, _rows(name, pairs), place, name, 1)
    batch = service_batch(remote.train_dataset.rows)
    steps = []
    for logprobs_of in (_of_service, _of_model):
        given = policy if logprobs_of is _of_service else equal
        extra = {}
        if remote.loss.traits.step_statistic:
            extra = {"step": batch["packs"][0]["statistic"]}
        elif remote.loss.traits.needs_mismatched:
            from perturn.training.row_intake import mismatches

            own = mismatches(
                remote.loss,
                lambda pack, of=logprobs_of, who=given: (of(who, pack), None, {}),
                batch["mismatched"],
            )
            extra = {"step": torch.tensor(own)}
        leaf = logprobs_of(given, batch["packs"][0]).clone().requires_grad_()
        chosen, rejected = both_sides(batch["packs"][0], leaf)
        remote.loss(chosen, rejected, **extra).mean().backward()
        steps.append(leaf.grad)
    remote.policy.close()
    return _largest(*steps)


def _rows(name: str, pairs: list[PreferencePair]) -> list[Any]:
    """Return rows of the kind that a loss reads."""
    kind = LOSSES[name]().traits.rows
    if kind == "pairs":
        return pairs
    if kind == "groups":
        return [
            WeightedTrajectory(
                pair.rejected, tuple(0.5 - (n + k) % 2 for k in range(len(pair.rejected.turns)))
            )
            for n, pair in enumerate(pairs)
        ]
    if kind == "labelled":
        sides = [(pair.chosen, 1.0) if n % 2 else (pair.rejected, -1.0) for n, pair in enumerate(pairs)]
        return [WeightedTrajectory(one, (label,) * len(one.turns)) for one, label in sides]
    return [pair.chosen for pair in pairs]


def _measured(pair: PreferencePair) -> PreferencePair:
    """Return a pair with an invented distance to success at each turn, which w-dpo reads."""

    def side(one: Trajectory) -> Trajectory:
        turns = (replace(turn, remaining=Remaining(9 - k, 8 - k + k % 2)) for k, turn in enumerate(one.turns))
        return replace(one, turns=tuple(turns))

    return PreferencePair(side(pair.chosen), side(pair.rejected))


def _of_service(policy: RemotePolicy, pack: Batch) -> torch.Tensor:
    return policy.logprobs(pack["asked"], 1 << 20)[1]  # type: ignore[arg-type]


def _of_model(model: Any, pack: Batch) -> torch.Tensor:
    with torch.no_grad():
        return action_logprobs(model, pack)


def _largest(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    return float((ours.detach() - theirs.detach()).abs().max())


if __name__ == "__main__":
    main()
