"""Read token ids and log-probabilities from answers of chat completions, as vLLM and its clients return them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perturn.errors import DataError
from perturn.formats.logs.log_values import mapping
from perturn.types import Action

_NUMBERED = re.compile(r"token_id:(\d+)")
"""Pattern of a token that vLLM names by its id (`return_tokens_as_token_ids`)."""


def with_choice_tokens(action: Action, choice: Mapping[str, Any], where: str) -> Action:
    """Add the sampled token ids and log-probabilities of a choice to an answer, if the choice has token ids.

    The ids are under `token_ids` (vLLM's `return_token_ids`), or stand in place of the tokens in `logprobs`.

    Raises:
        DataError: If the number of log-probabilities differs from the number of ids.
    """
    content = mapping(choice.get("logprobs")).get("content")
    entries = [mapping(each) for each in content] if isinstance(content, list) else []
    ids = choice.get("token_ids")
    if not ids:
        named = [_NUMBERED.fullmatch(str(each.get("token"))) for each in entries]
        ids = [int(found[1]) for found in named if found]
        if not ids or len(ids) != len(named):
            return action
    if not isinstance(ids, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in ids):
        raise DataError(f"{where}: token_ids: expected a list of whole numbers, got {ids!r:.80}.")
    logprobs = None
    if entries:
        given = [each.get("logprob") for each in entries]
        logprobs = tuple(each for each in given if isinstance(each, int | float))
        if not len(given) == len(logprobs) == len(ids):
            raise DataError(
                f"{where}: logprobs: expected a number for each of {len(ids)} token ids, got {len(logprobs)}."
            )
    return replace(action, token_ids=tuple(ids), logprobs=logprobs)
