"""Failures of prompts: conversations that cannot be written, or that exceed the model's context."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from perturn.errors import ContextFull, DataError, EngineFailure, ModelError, PromptRejected
from perturn.types import Prompt

if TYPE_CHECKING:
    from perturn.engines.protocol import Tokens

_CODES = {
    "context_length_exceeded",  # OpenAI, Azure, Groq, Cerebras
    "exceed_context_size_error",  # llama.cpp
    "model_max_prompt_tokens_exceeded",  # GitHub Copilot
    "tokens_limit_reached",  # GitHub Models
}
"""Codes and types of the errors that servers send when a conversation exceeds the model's context."""
_SAID = re.compile(
    "|".join(
        (
            r"maximum (context|prompt|model|input) length",  # OpenAI, vLLM, SGLang, DeepSeek, Mistral, xAI, Fireworks
            r"max_(model|seq)_len",  # vLLM, TensorRT-LLM
            r"(longer|greater) than (\S+ ){0,3}context",  # SGLang, LM Studio
            r"exceed\w* (\S+ ){0,3}(context|max length|model token limit)",  # llama.cpp, Anthropic, Zhipu, Moonshot
            r"context (length|size|window|limit) (\S+ ){0,3}exceed",  # llama.cpp, MiniMax
            r"context (the )?overflows",  # LM Studio
            r"(prompt|input) is too long",  # Anthropic, Bedrock, Fireworks
            r"input tokens? (count )?(\S+ )?exceeds? the",  # OpenAI, Gemini
            r"too many tokens",  # Cohere
            r"range of input length",  # DashScope
            r"`inputs` (tokens \+ `max_new_tokens` must be|must have less than \d+ tokens)",  # TGI, Together
            r"reduce the length of (the|your) (messages|input|prompt)",  # Groq, OpenAI
        )
    ),
    re.IGNORECASE,
)
"""Patterns of the error messages of servers that send none of these codes."""


def ids_of(tokens: Tokens, prompt: Prompt) -> list[int] | EngineFailure:
    """Return the token ids of a prompt, or a failure if its conversation cannot be written.

    A policy, an environment or an agent's program may write what a chat template rejects, such as two system messages.
    That fails its episode, and no other.
    """
    try:
        return tokens.prompt_ids(prompt)
    except (DataError, ModelError) as error:
        return PromptRejected(str(error))


def context_full(tokens: int, limit: int) -> ContextFull:
    """Return the failure of a prompt that leaves no tokens for an answer.

    Args:
        tokens: Length of the prompt in tokens.
        limit: Context length of the model in tokens.
    """
    return ContextFull(
        f"the conversation has {tokens} tokens, which leaves no room for an answer in the model's {limit}; lower the "
        "turn limit or take a model with a longer context."
    )


def says_context_full(text: str, *codes: object) -> bool:
    """Return whether a server rejected a prompt because prompt and answer exceed the model's context.

    Args:
        text: Message of the server's error.
        codes: Code and type of the error; None for a missing code or type.
    """
    return not _CODES.isdisjoint(map(str, codes)) or bool(_SAID.search(text))
