"""The conversation between an agent and a simulated user, with the messages as the user's model sees them."""

from __future__ import annotations

from collections.abc import Sequence

from perturn.types import Message, Observation, UserTurn

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Words with which the user ends the conversation, as in tau2-bench."""


class UserTalk:
    """State of a conversation: its messages, whose turn it is, and whether it is over.

    In the messages, the agent has the role `user` and the user has the role `assistant`.
    """

    def __init__(self, instructions: str, greeting: str, script: Sequence[str] = ()) -> None:
        """Start with the agent's greeting.

        Args:
            instructions: Instructions for the model that plays the user.
            greeting: First message, which the agent says.
            script: Messages of the user if no model plays the user. Then the user ends the conversation.
        """
        self._instructions, self._script = instructions, list(script)
        self._heard: list[Message] = [{"role": "user", "content": greeting}]
        self.waits = False
        """Whether it is the user's turn."""
        self.over = False
        """Whether the user has ended the conversation."""

    @property
    def heard(self) -> list[Message]:
        """Messages so far."""
        return list(self._heard)

    def hand_over(self, said: str = "") -> Observation:
        """Add the agent's message, and return the observation that asks for the user's turn.

        Args:
            said: Message of the agent; empty at the beginning, after the greeting.
        """
        if said:
            self._heard.append({"role": "user", "content": said})
        self.waits = True
        spoken = sum(each["role"] == "assistant" for each in self._heard)
        scripted = self._script[spoken] if spoken < len(self._script) else STOPS[0]
        return Observation("", user=UserTurn(self._instructions, tuple(self._heard), scripted))

    def hear(self, text: str) -> None:
        """Add the user's message."""
        self.waits = False
        self.over = any(stop in text for stop in STOPS)
        self._heard.append({"role": "assistant", "content": text})
