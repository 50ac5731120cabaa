"""A stand-in for a vLLM server, which knows its endpoints and no model."""

import threading
from dataclasses import dataclass, field


@dataclass
class Server:
    """A stand-in: what it was asked, and what it says instead of what it should."""

    url: str = ""
    version: str = "default"
    context: int = 100
    device: str = "cuda"
    says: dict = field(default_factory=dict)
    """Path -> (status, answer), or a function of the body and the number of requests to that path."""
    asked: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path, headers, body):
        """Status and JSON."""
        with self.lock:
            self.asked.append((path, body))
            number = sum(path == each for each, _ in self.asked)
        if (said := self.says.get(path)) is not None:
            said = said(body, number) if callable(said) else said
        name = path.partition("?")[0].strip("/").replace("/", "_")
        return said or (200, getattr(self, name)(body))

    def v1_models(self, body):
        """The model, with its context."""
        return {"data": [{"id": "served", "max_model_len": self.context}]}

    def weight_info(self, body):
        """The label of the weights."""
        return {"weight_version": self.version}

    def server_info(self, body):
        """The device, among much else."""
        return {"vllm_config": f"seed=0, device_config={self.device}, quantization=None"}

    def collective_rpc(self, body):
        """Weights are taken."""
        return {"results": [None]}

    def reset_prefix_cache(self, body):
        """Nothing holds the cache."""
        return {"success": True}

    def pause(self, body):
        """Sample nothing."""
        return {"status": "paused"}

    def resume(self, body):
        """Go on."""
        return {"status": "resumed"}

    def update_weight_version(self, body):
        """Take the label."""
        self.version = body["new_version"]
        return {"success": True}

    def inference_v1_generate(self, body):
        """Two tokens that depend on the seed, and the end."""
        seed = body["sampling_params"].get("seed", 0)
        ids = [100 + seed % 7, 200, 2]
        return {
            "choices": [
                {
                    "finish_reason": "stop",
                    "token_ids": ids[-body["sampling_params"]["max_tokens"] :],
                    "logprobs": {"content": [{"token_id": i, "logprob": -0.5 - seed % 2} for i in ids]},
                    "weight_versions": [{"version": self.version, "start": 0, "end": 3}],
                }
            ],
            "usage": {"prompt_tokens_details": {"cached_tokens": 5}},
        }

    def paths(self):
        """What was asked, without the bodies."""
        return [path for path, _ in self.asked]

    def generated(self):
        """The requests for answers to prompts."""
        return [body for path, body in self.asked if path == "/inference/v1/generate" and "model" in body]
