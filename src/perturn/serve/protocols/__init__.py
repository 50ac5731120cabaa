"""Server side of the model providers' protocols: chat completions, responses and messages."""
