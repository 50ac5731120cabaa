"""The engine that is a server of OpenAI's protocol."""
