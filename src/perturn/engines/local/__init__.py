"""The engine of this process: transformers' models with each conversation's keys and values kept."""
