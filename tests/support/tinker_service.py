"""Small HTTP service of the Tinker API, which trains adapters of a small Llama in this process with torch.

The service really computes its answers. Tests choose its convention for dividing losses, and its faults.
"""

import copy
import itertools
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

from engines.serving import serve
from perturn.policy.models import add_adapters

BASE = "tiny"


@dataclass
class Faults:
    """Faults of the service."""

    sign: float = 1.0
    """Factor on gradients."""
    replaces: bool = False
    """Whether a gradient replaces the gradient of the previous request, instead of being added to it."""
    nan: bool = False
    """Whether log-probabilities are NaN."""
    errors: bool = False
    """Whether each request gets HTTP status 500."""
    silent: bool = False
    """Whether answers never come."""
    rejects: tuple = ()
    """Losses that the service rejects."""


@dataclass
class TinkerService:
    """The service. `engines.serving.serve` takes its method `answer`."""

    model: object
    of_sequence: str = "nothing"
    of_batch: str = "nothing"
    batch: str = "step"
    clips: bool = True
    keeps_optimizer: bool = False
    """Whether weights are always loaded with their optimizer state, as in SkyRL 0.3.0."""
    faults: Faults = field(default_factory=Faults)
    adapters: dict = field(default_factory=dict)
    saved: dict = field(default_factory=dict)
    samplers: dict = field(default_factory=dict)
    futures: dict = field(default_factory=dict)
    steps: int = 0
    sampled: int = 0

    def __post_init__(self):
        self._ids = itertools.count()

    def restart(self):
        """Lose everything that was not saved."""
        self.adapters, self.samplers, self.futures = {}, {}, {}

    def answer(self, path, headers, body):
        """Answer a request."""
        name = path.rpartition("/")[2]
        if name == "healthz":
            return 200, {"status": "ok"}
        if self.faults.errors:
            return 500, {"detail": "no"}
        if name == "retrieve_future":
            if self.faults.silent:
                time.sleep(0.2)
                return 408, {"detail": "later"}
            return self.futures.get(body["request_id"], (404, {"detail": "Future not found"}))
        if found := {
            "config": {"pjwt_auth_enabled": False},
            "create_session": {"type": "create_session", "session_id": f"session_{next(self._ids)}"},
            "session_heartbeat": {"type": "session_heartbeat"},
            "telemetry": {"status": "accepted"},
            "weights_info": {"base_model": BASE, "is_lora": True},
        }.get(name):
            rank = {} if name != "weights_info" else {"lora_rank": self.saved[body["tinker_path"]]["rank"]}
            return 200, found | rank
        if name == "create_sampling_session":
            key = self._sampler(self._with_adapters(1, 0))
            return 200, {"type": name, "sampling_session_id": key}
        key = str(next(self._ids))
        try:
            self.futures[key] = 200, getattr(self, f"_{name}")(body)
        except KeyError as error:
            self.futures[key] = 400, {"detail": f"Model {error} not loaded"}
        except ValueError as error:
            return 400, {"detail": str(error)}
        return 200, {"request_id": key, "future_id": key, "status": "pending"}

    def _create_model(self, body):
        config = body["lora_config"]
        model = self._with_adapters(config["rank"], config.get("seed") or 0)
        key = f"model_{next(self._ids)}"
        self.adapters[key] = {
            "model": model,
            "rank": config["rank"],
            "optimizer": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0),
            "lengths": [],
        }
        return {"type": "create_model", "model_id": key}

    def _with_adapters(self, rank, seed):
        config = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        return add_adapters(copy.deepcopy(self.model), config, seed)

    def _unload_model(self, body):
        self.adapters.pop(body["model_id"], None)
        return {"type": "unload_model", "model_id": body["model_id"]}

    def _forward(self, body):
        with torch.no_grad():
            return self._passed(body["model_id"], body["forward_input"])[1]

    def _forward_backward(self, body):
        adapter, given = self.adapters[body["model_id"]], body["forward_backward_input"]
        if given["loss_fn"] in self.faults.rejects:
            raise ValueError(f"unknown loss {given['loss_fn']}")
        losses, found, lengths = self._passed(body["model_id"], given, True)
        total = sum(losses) * self.faults.sign
        if self.batch == "request":
            total = total / self._divisor(lengths)
        if self.faults.replaces:
            adapter["optimizer"].zero_grad()
        total.backward()
        adapter["lengths"] += lengths
        return found

    def _divisor(self, lengths):
        return {"nothing": 1, "sequences": len(lengths), "tokens": sum(lengths)}[self.of_batch]

    def _passed(self, key, given, learns=False):
        model, losses, outputs, lengths = self.adapters[key]["model"], [], [], []
        for datum in given["data"]:
            ids = [token for chunk in datum["model_input"]["chunks"] for token in chunk["tokens"]]
            inputs = {name: each["data"] for name, each in datum["loss_fn_inputs"].items()}
            logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            logprobs = logits.gather(-1, torch.tensor(inputs["target_tokens"])[:, None]).squeeze(-1)
            values = [math.nan] * len(ids) if self.faults.nan else logprobs.tolist()
            outputs.append({"logprobs": {"data": values, "dtype": "float32", "shape": [len(ids)]}})
            lengths.append(len(ids))
            if learns:
                loss = _loss(given["loss_fn"], logprobs, {k: torch.tensor(v) for k, v in inputs.items()})
                losses.append(loss / (len(ids) if self.of_sequence == "tokens" else 1))
        found = {"loss_fn_output_type": "scalar", "loss_fn_outputs": outputs, "metrics": {}}
        return losses, found, lengths

    def _optim_step(self, body):
        adapter, adam = self.adapters[body["model_id"]], {"weight_decay": 0.0} | body["adam_params"]
        optimizer = adapter["optimizer"]
        (group,) = optimizer.param_groups
        group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"])}
        group |= {"eps": adam["eps"], "weight_decay": adam["weight_decay"]}
        if self.batch == "step" and adapter["lengths"]:
            for each in group["params"]:
                each.grad = each.grad / self._divisor(adapter["lengths"]) if each.grad is not None else None
        most = adam["grad_clip_norm"] if self.clips and adam["grad_clip_norm"] else math.inf
        norm = torch.nn.utils.clip_grad_norm_(group["params"], most)
        optimizer.step()
        optimizer.zero_grad()
        adapter["lengths"] = []
        self.steps += 1
        return {"metrics": {"grad_norm": float(norm)}}

    def _save_weights(self, body):
        adapter, path = self.adapters[body["model_id"]], f"tinker://{body['model_id']}/weights/{body['path']}"
        assert path not in self.saved
        weights = get_peft_model_state_dict(adapter["model"])
        self.saved[path] = copy.deepcopy(
            {"weights": weights, "optimizer": adapter["optimizer"].state_dict(), "rank": adapter["rank"]}
        )
        return {"type": "save_weights", "path": path}

    def _load_weights(self, body):
        adapter, saved = self.adapters[body["model_id"]], copy.deepcopy(self.saved[body["path"]])
        set_peft_model_state_dict(adapter["model"], saved["weights"])
        if body.get("optimizer") or self.keeps_optimizer:
            adapter["optimizer"].load_state_dict(saved["optimizer"])
        return {"type": "load_weights"}

    def _save_weights_for_sampler(self, body):
        model = copy.deepcopy(self.adapters[body["model_id"]]["model"])
        return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": self._sampler(model)}

    def _sampler(self, model):
        key = f"sampling_{next(self._ids)}"
        self.samplers[key] = model
        return key

    @torch.no_grad()
    def _asample(self, body):
        model, how = self.samplers[body["sampling_session_id"]], body["sampling_params"]
        ids = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        draw = torch.Generator().manual_seed(how["seed"])
        new, logprobs = [], []
        while len(new) < how["max_tokens"] and (not new or new[-1] not in how["stop"]):
            found = model(input_ids=torch.tensor([ids + new])).logits[0, -1].log_softmax(-1)
            heat = how["temperature"]
            token = (
                int((found / heat).softmax(-1).multinomial(1, generator=draw))
                if heat
                else int(found.argmax())
            )
            new.append(token)
            logprobs.append(float(found[token]))
        self.sampled += 1
        reason = "stop" if new[-1] in how["stop"] else "length"
        return {
            "type": "sample",
            "sequences": [{"stop_reason": reason, "tokens": new, "logprobs": logprobs}],
        }


def _loss(name, logprobs, inputs):
    """Return the loss of a sequence, as the Tinker API defines it."""
    if name == "cross_entropy":
        return -(inputs["weights"] * logprobs).sum()
    ratio = (logprobs - inputs["logprobs"]).exp()
    return -(ratio * inputs["advantages"]).sum()


@contextmanager
def serving(model, **how):
    """Serve a model. Yield the service, whose address is `url`."""
    service = TinkerService(model, **how)
    with serve(service.answer) as url:
        service.url = url
        yield service
