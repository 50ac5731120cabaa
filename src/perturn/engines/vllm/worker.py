"""Extension of vLLM's CPU workers; vLLM loads it by the name in its argument `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

EXTENSION = "perturn.engines.vllm.worker.CpuReload"
METHOD = "reload_weights_on_cpu"


class CpuReload:
    """Mixin that vLLM adds to its worker class."""

    model_runner: Any
    reload_weights: Any

    def reload_weights_on_cpu(self, weights_path: str) -> None:
        """Call `reload_weights`, and pack the output layer again.

        On a CPU, vLLM multiplies by a packed copy of the output layer. If the output layer is tied to the embeddings,
        `reload_weights` of vLLM 0.32 leaves the copy unchanged and reports no error.
        """
        self.reload_weights(weights_path=weights_path)
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)
