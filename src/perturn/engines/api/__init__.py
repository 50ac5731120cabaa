"""The engine `api`: a server of OpenAI's chat-completions protocol."""
