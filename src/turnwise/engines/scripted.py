"""An engine without a model: it plays given actions, such as an expert's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnwise.errors import EngineFailure
from turnwise.types import Action, Prompt, Sampling


class ScriptedEngine:
    """Answers each conversation with the next line of its script."""

    def __init__(self, scripts: Mapping[str, Sequence[str]], name: str = "expert") -> None:
        """Keep the scripts.

        Args:
            scripts: Conversation -> texts of its actions, in order.
            name: Identity stamped on the trajectories.
        """
        self.name = name
        self._scripts = scripts

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """The next line of each script; a script that has run out is a failure."""
        del sampling
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Action | EngineFailure:
        script = self._scripts[prompt.conversation]
        if len(prompt.turns) < len(script):
            return Action(script[len(prompt.turns)])
        return EngineFailure(f"the script of {prompt.conversation} ended after {len(script)} actions.")

    def forget(self, conversation: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""
