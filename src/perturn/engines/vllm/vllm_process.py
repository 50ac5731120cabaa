"""vLLM in this process: its front end runs here, and vLLM starts a process for each replica of the model."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from perturn.engines.prompt_failures import says_context_full
from perturn.engines.vllm.backend import LOADING, Sampled, labels
from perturn.engines.vllm.orphan_watch import Watch
from perturn.engines.vllm.settings import RANKS, VllmSettings
from perturn.engines.vllm.worker import EXTENSION, METHOD
from perturn.errors import ContextFull, EngineFailure, RunError
from perturn.table import require_library

_CPU_GIGABYTES = 2.0
"""Size of the KV cache on a CPU in gigabytes; by default, vLLM would take nearly all memory."""
_CPU_BLOCK = 32
"""Block size of the prefix cache on a CPU, in tokens; with vLLM's default of 128, short turns are rarely reused."""

_ADAPTERS = 1
"""vLLM's id of the served adapters. New adapters get the same id, so that unfinished answers continue with them."""


def require_vllm(settings: VllmSettings) -> None:
    """Raise an error if vLLM is not installed."""
    if settings.servers:
        require_library(
            "vllm", f"engine.handover={settings.handover}", "vllm", ", or leave engine.handover out."
        )
    else:
        require_library("vllm", "engine vllm", "vllm", ", or name running servers with engine.servers.")


class InProcess:
    """Backend that runs vLLM's asynchronous engine in this process."""

    def __init__(
        self, model: str, settings: VllmSettings, dtype: str, context: int | None, adapter_rank: int
    ) -> None:
        """Start vLLM; call this inside a running event loop.

        Args:
            model: Folder or Hub id.
            settings: Settings of the engine.
            dtype: Data type of the computation.
            context: Longest sequence in tokens; None: the model's own limit.
            adapter_rank: Largest rank of adapters that will be loaded; 0: no adapters.

        Raises:
            PerturnError: If vLLM is missing, or cannot start.
        """
        require_vllm(settings)
        self.replicas = settings.replicas
        self._numbers, self._adapters = itertools.count(1), None  # None: no adapters are served
        self._seconds = settings.timeout
        self._watch, self._until_closed = Watch(), ExitStack()
        if settings.handover == "ipc":
            self._until_closed.enter_context(_pickling())
        try:
            with vllm_environment():
                import vllm
                from vllm.v1.engine import async_llm, exceptions

                found = _arguments(model, settings, dtype, context, adapter_rank)
                self._reload = METHOD if found.get("worker_extension_cls") == EXTENSION else "reload_weights"
                arguments = vllm.AsyncEngineArgs(**found)
                self._llm: Any = async_llm.AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            self._watch.close()
            self._until_closed.close()
            raise RunError(
                f"vLLM cannot start: {type(error).__name__}: {error} VLLM_LOGGING_LEVEL=INFO shows its log."
            ) from error
        self._watch.started()
        self._vllm, self._dead = vllm, exceptions.EngineDeadError
        self.limit = int(self._llm.model_config.max_model_len)

    async def open(self, model: str, version: str) -> None:
        """Label later tokens with the version of the weights with which vLLM was started."""
        await self._llm.update_weight_version(version)

    async def answer(self, replica: int, ids: Sequence[int], sampling: dict[str, Any]) -> Sampled:
        """Sample an answer to a prompt."""
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        asked = self._llm.generate(
            self._vllm.inputs.tokens_input(list(ids)),
            self._vllm.SamplingParams(**sampling, output_kind=kind),
            str(next(self._numbers)),
            lora_request=self._adapters,
            data_parallel_rank=replica if self.replicas > 1 else None,
        )
        try:
            with self._alive():
                output = [each async for each in asked][-1]
        except ValueError as error:  # vLLM rejects the prompt
            kind = ContextFull if says_context_full(str(error)) else EngineFailure
            raise kind(f"vLLM refuses the prompt: {error}") from error
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise RunError(f"vLLM ended an answer by {answer.finish_reason!r}.")
        tokens = list(answer.token_ids)
        return Sampled(
            tokens,
            [likely[token].logprob for likely, token in zip(answer.logprobs, tokens, strict=True)],
            labels((span.version, span.start, span.end) for span in answer.weight_versions or ()),
            output.num_cached_tokens or 0,
        )

    async def load(self, folder: str, version: str, adapters: bool = False) -> None:
        """Replace the weights of all replicas, or their adapters; unfinished answers use the new adapters too."""
        try:
            if adapters:
                name: Any = ("adapters", _ADAPTERS, folder)
                await self._llm.add_lora(self._vllm.lora.request.LoRARequest(*name, load_inplace=True))
                self._adapters = self._vllm.lora.request.LoRARequest(*name)
            else:
                await self._llm.collective_rpc(self._reload, kwargs={"weights_path": folder})
                self._adapters = None
        except Exception as error:
            raise RunError(
                f"vLLM cannot take the weights in {folder}: {type(error).__name__}: {error}"
            ) from error
        await self.label(version)

    async def workers(self) -> list[int]:
        """Return the number of workers of all replicas together, as a list of one number."""
        return [self._llm.vllm_config.parallel_config.world_size_across_dp]

    async def transfer(self, step: str, bodies: Sequence[dict[str, Any]]) -> None:
        """Run a step of vLLM's weight transfer in all workers."""
        with self._alive():
            if step == "start_weight_update":
                await self._llm.update_weight_version(LOADING)
                self._adapters = None  # they belong to the replaced weights
            await asyncio.wait_for(self._llm.collective_rpc(step, kwargs=bodies[0]), self._seconds)

    async def label(self, version: str) -> None:
        """Drop all cached keys and values, and label later tokens with a version."""
        with self._alive():
            if await self._llm.reset_prefix_cache() is False:
                raise RunError("vLLM still answers while its weights are replaced; the same command goes on.")
            await self._llm.update_weight_version(version)

    async def pause(self) -> None:
        """Stop sampling without ending the unfinished answers, and drop all cached keys and values."""
        with self._alive():
            await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        """Continue the answers that `pause` stopped."""
        with self._alive():
            await self._llm.resume_generation()

    async def sleep(self) -> None:
        """Move the weights to the main memory, and free the KV cache."""
        await self._llm.sleep(1)

    async def wake(self, parts: Sequence[str]) -> None:
        """Move the weights back to the device, allocate the KV cache, or both."""
        await self._llm.wake_up(list(parts))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Raise a `RunError` if vLLM has died."""
        try:
            yield
        except self._dead as error:
            raise RunError(
                "vLLM has died; its own words are above. The same command goes on with what is missing."
            ) from error

    async def close(self) -> None:
        """Shut vLLM and its processes down."""
        llm, self._llm = self._llm, None  # vLLM warns if it is shut down only when the interpreter ends
        llm.shutdown(timeout=0)
        self._watch.close()
        self._until_closed.close()


def _arguments(
    model: str, settings: VllmSettings, dtype: str, context: int | None, adapter_rank: int
) -> dict[str, Any]:
    """Return the engine arguments of vLLM; see `InProcess` for the arguments."""
    import vllm.platforms

    on_cpu = vllm.platforms.current_platform.is_cpu()
    gigabytes = settings.cache_gigabytes or (_CPU_GIGABYTES if on_cpu else None)
    found: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": context,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "raw_logprobs",
        "kv_cache_memory_bytes": None if gigabytes is None else int(gigabytes * 1e9),
        "data_parallel_size": settings.replicas,
        "disable_log_stats": True,
    }
    if adapter_rank:
        found |= {"enable_lora": True, "max_lora_rank": min(rank for rank in RANKS if rank >= adapter_rank)}
    if settings.sleep and not on_cpu:
        found["enable_sleep_mode"] = True
    if on_cpu:
        found |= {"block_size": _CPU_BLOCK, "worker_extension_cls": EXTENSION}
        found["enable_chunked_prefill"] = False  # vLLM 0.32 on a CPU crashes if a seeded prompt is split
    if settings.traits.takes_models:
        found["weight_transfer_config"] = {"backend": settings.handover}
    return found | settings.options


@contextmanager
def _pickling() -> Iterator[None]:
    """Allow pickled values between vLLM's processes and this process: handles of GPU memory are pickled.

    The variable must be set in this process too, for as long as vLLM runs: without it, vLLM's replies are lost.
    """
    name = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def vllm_environment() -> Iterator[None]:
    """Set environment variables for vLLM unless the user has set them; restore all variables afterwards.

    vLLM sets variables itself: it preloads libraries and sets a world size. Environments and trainers in this process
    must not inherit them.
    """
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # our threads do not survive a fork
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
