"""The engine that is vLLM, in this process or as servers."""
