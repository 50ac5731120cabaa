"""The errors users meet. Each message says where, what was expected, what was got, and what to do."""

import difflib
from collections.abc import Iterable

_LONGEST = 2000
"""Characters of a message; what it quotes from a file or a world may have any length."""


class PerturnError(Exception):
    """Base of all errors raised for the user's eyes; the command line prints it and exits with 2."""

    def __init__(self, message: str = "") -> None:
        """Say what is wrong. What is far too long is cut in its middle: a place comes first, a remedy last."""
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 4 :]}"
        super().__init__(message)


class ConfigError(PerturnError):
    """A recipe or a setting is wrong."""


class DataError(PerturnError):
    """A file, row or trajectory is malformed."""


class ModelError(PerturnError):
    """A model, tokenizer or chat template cannot be used."""


class EnvironmentFailure(PerturnError):
    """An environment could not start, reset or step."""


class WorldLost(EnvironmentFailure):
    """A world's process died or ran into a time limit; its episode may be played again."""


class BystanderLost(WorldLost):
    """A world died with a process that it shared, through no action of its own."""


class EngineFailure(PerturnError):
    """An inference engine could not answer."""


class RunError(PerturnError):
    """A run folder is missing, belongs to another recipe, or lacks what a stage needs."""


class StorageError(RunError):
    """A file cannot be written: the disk is full, read-only or broken."""


class InUseError(RunError):
    """Another process works in the run folder."""


class BudgetError(RunError):
    """The budget of a run is spent; all that was recorded is kept."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Sentence that names the closest known word and lists all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"{guess} Known: {', '.join(known) or 'none'}."
