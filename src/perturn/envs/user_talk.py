"""The conversation of an agent and a user, from the user's side."""

from __future__ import annotations

from collections.abc import Sequence

from perturn.types import Message, Observation, UserTurn

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Words with which a user ends the talk, as in tau2-bench."""


class UserTalk:
    """Messages of an agent and a user, the user's turn, and whether the talk is over."""

    def __init__(self, instructions: str, greeting: str, script: Sequence[str] = ()) -> None:
        """Start with the agent's greeting.

        Args:
            instructions: For the user's model.
            greeting: Of the agent.
            script: What the user says where no model plays the user, text by text; after that the user ends the talk.
        """
        self._instructions, self._script = instructions, list(script)
        self._heard: list[Message] = [{"role": "user", "content": greeting}]
        self.waits = False
        """Whether it is the user's turn."""
        self.over = False
        """Whether the user has ended the talk."""

    @property
    def heard(self) -> list[Message]:
        """The talk so far."""
        return list(self._heard)

    def hand_over(self, said: str = "") -> Observation:
        """Return the observation that hands over the user's turn.

        Args:
            said: Of the agent; empty at the beginning, after the greeting.
        """
        if said:
            self._heard.append({"role": "user", "content": said})
        self.waits = True
        spoken = sum(each["role"] == "assistant" for each in self._heard)
        scripted = self._script[spoken] if spoken < len(self._script) else STOPS[0]
        return Observation("", user=UserTurn(self._instructions, tuple(self._heard), scripted))

    def hear(self, text: str) -> None:
        """Add the user's text."""
        self.waits = False
        self.over = any(stop in text for stop in STOPS)
        self._heard.append({"role": "assistant", "content": text})
