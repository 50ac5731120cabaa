"""Running vLLM servers as replicas of a model.

Prompts and answers use vLLM's tokens-in-tokens-out protocol. Weights are updated through vLLM's development endpoints.
The OpenAI client sends the requests, and does the retries with back-off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from perturn.engines.prompt_failures import says_context_full
from perturn.engines.vllm.backend import LOADING, Sampled, labels
from perturn.engines.vllm.settings import VllmSettings
from perturn.engines.vllm.worker import EXTENSION, METHOD
from perturn.errors import ContextFull, EngineFailure, RunError
from perturn.table import require_library

_GENERATE = "/inference/v1/generate"
_PROBE: dict[str, Any] = {"token_ids": [0], "sampling_params": {"max_tokens": 1}}
"""Request that tests whether a server accepts token ids."""


class Servers:
    """Backend for running servers; the index of a replica is its index in the setting `servers`."""

    def __init__(self, settings: VllmSettings) -> None:
        """Make clients; nothing is sent yet.

        Raises:
            ConfigError: If the client library is missing.
        """
        require_library("openai", "engine.servers", "api")
        import openai

        self.replicas = len(settings.servers)
        self.limit = 0
        self._reload = "reload_weights"
        self._openai = openai
        self._addresses = settings.servers
        self._transfers = settings.traits.takes_models
        self._models: list[str] = []
        self._clients = [
            openai.AsyncOpenAI(
                api_key="none", base_url=address, timeout=settings.timeout, max_retries=settings.max_retries
            )
            for address in settings.servers
        ]

    async def open(self, model: str, version: str) -> None:
        """Check the servers, and load the weights of a model on them."""
        await self.meet()
        await self.load(model, version)

    async def meet(self) -> None:
        """Check the servers, and read the names and context lengths of their models.

        Servers that a killed run left paused are resumed.

        Raises:
            RunError: If a server does not answer, or does not accept token ids or weights.
        """
        found = await self._all("get", "/v1/models")
        models = [one["data"][0] for one in found]
        self._models = [model["id"] for model in models]
        self.limit = min(model["max_model_len"] for model in models)
        found_labels = [each["weight_version"] for each in await self._all("get", "/weight_info")]
        about = await self._all("get", "/server_info")
        if any("device_config=cpu" in each["vllm_config"] for each in about):
            self._reload = METHOD
        if self._transfers or LOADING in found_labels:
            await self._ready_transfer(found_labels)
        await self.resume()
        await self._all("post", _GENERATE, _PROBE)

    async def answer(self, replica: int, ids: Sequence[int], sampling: dict[str, Any]) -> Sampled:
        """Sample an answer to a prompt."""
        body = {
            "model": self._models[replica],
            "token_ids": list(ids),
            "sampling_params": sampling,
        }
        found = await self._ask(replica, "post", _GENERATE, body)
        choice = found["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise RunError(
                f"{self._addresses[replica]} ended an answer by {choice['finish_reason']!r}; see its log."
            )
        details = (found.get("usage") or {}).get("prompt_tokens_details") or {}
        return Sampled(
            choice["token_ids"],
            [each["logprob"] for each in choice["logprobs"]["content"]],
            labels(
                (each["version"], each["start"], each["end"]) for each in choice.get("weight_versions") or ()
            ),
            details.get("cached_tokens") or 0,
        )

    async def load(self, folder: str, version: str, adapters: bool = False) -> None:
        """Replace the weights of all servers whose label differs from `version`; adapters are not supported."""
        assert not adapters
        await asyncio.gather(*(self._load(replica, folder, version) for replica in range(self.replicas)))

    async def workers(self) -> list[int]:
        """Return the number of workers of each server."""
        return [each["world_size"] for each in await self._all("get", "/get_world_size")]

    async def transfer(self, step: str, bodies: Sequence[dict[str, Any]]) -> None:
        """Run a step of vLLM's weight transfer on all servers at once."""
        if step == "start_weight_update":
            await asyncio.gather(*(self._label(replica, LOADING) for replica in range(self.replicas)))
        asked = (
            self._ask(replica, "post", f"/{step}", body, retry=False) for replica, body in enumerate(bodies)
        )
        await asyncio.gather(*asked)

    async def label(self, version: str) -> None:
        """Drop all cached keys and values, and label later tokens with a version."""
        await asyncio.gather(*(self._renew(replica, version) for replica in range(self.replicas)))

    async def pause(self) -> None:
        """Stop sampling without ending the unfinished answers, and drop all cached keys and values."""
        await self._all("post", "/pause?mode=keep")

    async def resume(self) -> None:
        """Continue the answers that `pause` stopped."""
        await self._all("post", "/resume")

    async def sleep(self) -> None:
        """Do nothing: servers have their own devices."""

    async def wake(self, parts: Sequence[str]) -> None:
        """Do nothing: servers do not sleep."""

    async def close(self) -> None:
        """Release the connections."""
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _ready_transfer(self, found_labels: Sequence[str]) -> None:
        """Check that servers accept weights if `handover` sends them, and end interrupted updates of weights.

        Raises:
            RunError: If a server was started without NCCL. The sender would wait for it for minutes.
        """
        about = await self._all("get", "/server_info?config_format=json")
        for replica, (label, each) in enumerate(zip(found_labels, about, strict=True)):
            backend = (each["vllm_config"].get("weight_transfer_config") or {}).get("backend")
            if self._transfers and backend != "nccl":
                raise RunError(
                    f"{self._addresses[replica]} does not take weights from memory; start it with "
                    '--weight-transfer-config \'{"backend": "nccl"}\', or leave engine.handover out.'
                )
            if label == LOADING and backend is not None:
                await self._end_update(replica)

    async def _end_update(self, replica: int) -> None:
        """End an interrupted update of weights.

        During an unfinished update, a prompt makes vLLM crash, and new weights would mix with the received ones.
        """
        try:
            await self._ask(replica, "post", "/finish_weight_update", {}, retry=False)
        except RunError as error:
            if not isinstance(error.__cause__, self._openai.APIStatusError):
                raise
            # The update has failed, and vLLM counts it as ended.
            await self._ask(replica, "post", "/start_weight_update", {}, retry=False)
            await self._ask(replica, "post", "/finish_weight_update", {}, retry=False)

    async def _load(self, replica: int, folder: str, version: str) -> None:
        found = await self._ask(replica, "get", "/weight_info")
        if found["weight_version"] == version:
            return
        await self._label(replica, LOADING)  # if this process is killed now, the old label must be gone
        order = {"method": self._reload, "kwargs": {"weights_path": folder}}
        await self._ask(replica, "post", "/collective_rpc", order, retry=False)
        await self._renew(replica, version)

    async def _renew(self, replica: int, version: str) -> None:
        """Drop the cached keys and values of one server, and label its later tokens with a version."""
        dropped = await self._ask(replica, "post", "/reset_prefix_cache")
        if not dropped["success"]:
            raise RunError(
                f"{self._addresses[replica]} answers others while its weights are replaced; give each run its servers."
            )
        await self._label(replica, version)

    async def _label(self, replica: int, version: str) -> None:
        await self._ask(replica, "post", "/update_weight_version", {"new_version": version})

    async def _all(self, method: str, path: str, body: dict[str, Any] | None = None) -> list[Any]:
        return await asyncio.gather(
            *(self._ask(replica, method, path, body) for replica in range(self.replicas))
        )

    async def _ask(
        self, replica: int, method: str, path: str, body: dict[str, Any] | None = None, retry: bool = True
    ) -> Any:
        """Send a request to one server and return the answer.

        Raises:
            EngineFailure: If the server rejects the prompt.
            RunError: If the request fails for any other reason.
        """
        client = self._clients[replica] if retry else self._clients[replica].with_options(max_retries=0)
        send = getattr(client, method)
        try:
            return await send(path, cast_to=object, **({} if body is None else {"body": body}))
        except self._openai.APIStatusError as error:
            said = f"{self._addresses[replica]} answers {path} with {error.status_code}: {error!s:.500}"
            if error.status_code in (400, 422) and body is not None and "token_ids" in body:
                kind = ContextFull if says_context_full(said) else EngineFailure
                raise kind(said) from error
            raise RunError(f"{said}{_remedy(error.status_code, path)}") from error
        except (self._openai.OpenAIError, ValueError) as error:  # ValueError: an answer that is not JSON
            raise RunError(
                f"{self._addresses[replica]} does not answer {path}: {type(error).__name__}: {error}; start it, and "
                "the same command goes on."
            ) from error


def _remedy(status: int, path: str) -> str:
    if path == _GENERATE and status in (403, 404):
        return "; it must be a vLLM server of version 0.32 or later, started with --enable-scale-out."
    if status == 404:
        return "; start it with VLLM_SERVER_DEV_MODE=1, so that it can be given weights."
    if path == "/collective_rpc":
        return (
            "; the server must be able to read the folder, which holds weights of the model that it was started with. "
            f"On a CPU, start the server with --worker-extension-cls {EXTENSION}."
        )
    return "; its log says more. The same command goes on."
