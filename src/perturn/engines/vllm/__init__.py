"""The engine `vllm`: vLLM, started by this process or as running servers."""
