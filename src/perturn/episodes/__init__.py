"""Play episodes, one or many at a time; action formats, prompts and tool calls. No model I/O."""
