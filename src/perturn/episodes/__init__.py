"""One episode of one task, and many at once; formats, prompts, tool calls. No model I/O."""
