"""An engine that says one word to the base policy's prompts, and serves what was trained by the local engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from perturn.extend import EFFORT, Action, Bound, ConfigError, EngineTraits, LocalSettings


@dataclass(frozen=True)
class ParrotSettings:
    """Say one word to the prompts of the base policy."""

    traits: ClassVar[EngineTraits] = EngineTraits(serves_checkpoints=True)

    word: str = "right"
    """What the base policy says."""
    patience: Annotated[int, Bound(least=1), EFFORT] = 1
    """Changes nothing of what is made."""

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        """Reject other words."""
        if self.word not in ("left", "right"):
            raise ConfigError(f"engine.word must be left or right, got {self.word!r}.")

    def open(self, serving):
        """Serve a policy."""
        return Parrot(self.word) if serving.policy == "base" else LocalSettings(pack=False).open(serving)


class Parrot:
    """Says one word."""

    def __init__(self, word):
        self.name, self.word = f"parrot-{word}", word

    def generate(self, prompts, sampling):
        """Return the word for each prompt."""
        return [Action(self.word) for _ in prompts]

    def forget(self, conversation):
        """Nothing is kept."""

    def close(self):
        """Nothing is open."""
