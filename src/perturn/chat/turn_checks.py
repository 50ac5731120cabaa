"""Checks of the turns of a trajectory that need no tokenizer and no chat template."""

from __future__ import annotations

from collections.abc import Mapping

from perturn.errors import DataError
from perturn.io.call_arguments import read_arguments
from perturn.types import Trajectory


def check_turns(trajectory: Trajectory) -> None:
    """Refuse a trajectory without turns, ids that no tensor holds, and calls that no template reads."""
    if not trajectory.turns:
        raise DataError(f"trajectory of task {trajectory.task.id!r} has no assistant turn; remove the row.")
    for number, turn in enumerate(trajectory.turns):
        action, where = turn.action, f"task {trajectory.task.id!r}: turns[{number}].action"
        for index, token in enumerate(action.token_ids or ()):
            if not 0 <= token < 2**31:
                raise DataError(
                    f"{where}.token_ids[{index}]: expected a token id, got {token:.4g}; remove the row."
                )
        for index, call in enumerate(action.tool_calls):
            function = call.get("function", call)
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise DataError(
                    f"{where}.tool_calls[{index}]: expected the name of a function, got {call!r:.80}; remove the row."
                )
            given = function.get("arguments", {})
            if isinstance(given, str) and read_arguments(given) is None:
                raise DataError(
                    f"{where}.tool_calls[{index}]: expected an object of arguments or its JSON text, got "
                    f"{given!r:.60}; remove the row."
                )
