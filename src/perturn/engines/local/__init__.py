"""The engine `local`: a transformers model in this process, with a KV cache for each conversation."""
