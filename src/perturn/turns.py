"""Turn of an episode: an observation, the action that answered it, and the turn whose context it extends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perturn.errors import DataError
from perturn.remaining import Remaining
from perturn.rules import Message

SPARSE = {"sparse": True}
"""Metadata of a field that is written to a file only where it differs from its default."""
OPENS = -1
"""Value of `Turn.follows` for a turn that opens a new sequence of its episode."""


@dataclass(frozen=True)
class Opening:
    """Messages and tools before the observation of a turn that opens a new sequence of an episode."""

    prompt: tuple[Message, ...] = ()
    """Messages before the observation, such as a system text. They never carry loss."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas given to the chat template."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""


@dataclass(frozen=True)
class Action:
    """The policy's answer in one turn."""

    text: str
    """Content of the message, without the end-of-turn token."""
    token_ids: tuple[int, ...] | None = None
    """Token ids as sampled, including the end-of-turn token if it was sampled [tokens]. None if the action was recorded
    as text."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each sampled id under the behavior policy, at temperature 1, in nats [tokens]."""
    ended: bool = True
    """Whether the policy ended its turn itself. False: the action was cut at a token limit."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Native tool calls, in the chat-template form."""
    candidates: tuple[int, ...] = ()
    """Number of tokens of each candidate action, including the chosen action; empty if there was one candidate."""
    reasoning: str = field(default="", metadata=SPARSE)
    """Reasoning before the text, if the engine returned it in a separate field. The chat template writes both."""
    versions: tuple[int, ...] = field(default=(), metadata=SPARSE)
    """Version of the policy that sampled each id: the iteration that trained this policy, or 0 for the initial policy
    [tokens]. Empty: one policy sampled all ids, or the versions are unknown."""

    def __post_init__(self) -> None:
        if self.token_ids is not None and not self.token_ids:
            raise DataError("token_ids must hold at least one token or be None, got none.")
        if self.versions and len(self.versions) != len(self.token_ids or ()):
            raise DataError(
                f"versions must be empty or one for each of {len(self.token_ids or ())} token_ids, got "
                f"{len(self.versions)}."
            )

    @property
    def is_cut_inside(self) -> bool:
        """Whether a token limit cut a recorded text in its reasoning or in a tool call."""
        inside = self.tool_calls or (self.reasoning and not self.text.strip())
        return not self.ended and self.token_ids is None and bool(inside)

    def message(self) -> Message:
        """Return the action as an assistant message."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        return message


@dataclass(frozen=True)
class Turn:
    """One observation and the action that answered it."""

    observation: tuple[Message, ...]
    """Messages since the previous action: user or tool messages. Empty if two actions follow each other."""
    action: Action
    reward: float = 0.0
    """Reward of this action, from the environment or from a judge that replaces the environment's reward."""
    valid: bool = True
    """Whether the action could be parsed and the environment understood it."""
    state_key: str | None = None
    """Key of the environment's state before the action. Equal keys mean the same state. None: not known."""
    recalled: tuple[Message, ...] | None = None
    """Form of the observation in the shortened history of later turns; None: the observation itself."""
    remaining: Remaining | None = None
    """Number of turns to a success before and after the action; None: not measured."""
    trained: bool = field(default=True, metadata=SPARSE)
    """Whether training may put loss on the action; see `carries_loss`."""
    follows: int | None = field(default=None, metadata=SPARSE)
    """Index of the turn whose context this turn extends. None: the previous turn. `OPENS`: this turn opens a new
    sequence, for example after a compaction of the context or in a sub-agent."""
    opening: Opening | None = field(default=None, metadata=SPARSE)
    """Messages and tools before the observation, if the turn opens a new sequence. None: the messages and tools of the
    trajectory."""
    user_said: tuple[str, ...] = field(default=(), metadata=SPARSE)
    """Texts of the simulated user, in order, if the environment asked for the user's turn before this observation. When
    the episode resumes, the environment gets them again. They carry no loss."""
    environment_reward: float | None = field(default=None, metadata=SPARSE)
    """Reward from the environment, if `reward` includes a judge's rating. None: `reward` includes no rating."""

    @property
    def own_reward(self) -> float:
        """Reward from the environment, without a judge's rating."""
        return self.reward if self.environment_reward is None else self.environment_reward

    @property
    def carries_loss(self) -> bool:
        """Whether training puts loss on the action. The action must be marked for training and must not be empty.

        An action that was cut inside its reasoning or a tool call has no loss: the chat template closes these parts.
        """
        action = self.action
        written = action.text.strip() or action.tool_calls or action.token_ids or action.reasoning
        return self.trained and bool(written) and not action.is_cut_inside

    @property
    def observation_text(self) -> str:
        """The observation as one text."""
        return "\n".join(str(message.get("content") or "") for message in self.observation)


def misplaced(turns: Sequence[Turn], history: int | None = None) -> str | None:
    """Return a description of the first error in `follows` and `opening` of an episode's turns; None if they are valid.

    Args:
        turns: Turns of the episode, in the order in which they were taken.
        history: Number of earlier turns that the policy saw at each turn; None: all turns of the sequence.
    """
    for index, turn in enumerate(turns):
        if turn.follows is not None and not OPENS <= turn.follows < index:
            return f"turns[{index}].follows: expected {OPENS} or the index of an earlier turn, got {turn.follows}"
        if turn.opening is not None and (index == 0 or turn.follows != OPENS):
            return (
                f"turns[{index}].opening: expected it at a later turn with follows={OPENS} alone, since the first turn "
                "has the prompt of the trajectory"
            )
    if history is not None and any(turn.follows not in (None, at - 1) for at, turn in enumerate(turns)):
        return f"history: expected null where a turn has follows, got {history}"
    return None
