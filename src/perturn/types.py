"""Data of the loop: tasks, prompts, actions, turns, trajectories, pairs; and the Protocols of its two sides.

Standard library alone. Everything here is plain data that round-trips through JSON (see `store.py`). The rules that an
episode is played by are in `perturn.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from perturn.errors import DataError, EngineFailure, JudgeFailure, NotComeBack
from perturn.remaining import Remaining as Remaining
from perturn.rules import EpisodeProtocol as EpisodeProtocol
from perturn.rules import Message as Message
from perturn.rules import Sampling as Sampling
from perturn.rules import SimulatedUser as SimulatedUser
from perturn.turns import OPENS as OPENS
from perturn.turns import SPARSE as SPARSE
from perturn.turns import Action as Action
from perturn.turns import Opening as Opening
from perturn.turns import Turn as Turn
from perturn.turns import misplaced


class Status(StrEnum):
    """End of an episode's recording."""

    COMPLETED = "completed"
    """The episode ran to its end, or to a limit of Perturn."""
    FAILED = "failed"
    """The environment or the engine raised; `Trajectory.error` has the text."""
    UNFINISHED = "unfinished"
    """It has played its turns of an iteration (explorer `window`), and continues in the next one."""


@dataclass(frozen=True)
class Task:
    """One problem an environment can pose."""

    id: str
    """Unique within the environment, such as `find-plant/12`."""
    kind: str = ""
    """Task type, the unit that scores are broken down by."""
    split: str = "train"
    data: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own data, from which it poses the task; `answer`, if it is a text, is the gold answer."""


@dataclass(frozen=True)
class Trajectory:
    """One episode of one task, as recorded."""

    task: Task
    turns: tuple[Turn, ...]
    environment: str = ""
    """Name and version, such as `scienceworld-1.2.3`."""
    protocol: str = ""
    """Name of the protocol it was played under."""
    prompt: tuple[Message, ...] = ()
    """Messages before the first observation: system text, worked examples. They never carry loss."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas given to the chat template."""
    total_reward: float = 0.0
    success: bool = False
    terminated: bool = False
    """The environment ended the episode."""
    truncated: bool = False
    """A limit of Perturn ended the episode: the turn limit, or a full context."""
    status: Status = Status.COMPLETED
    error: str | None = None
    sample: int = 0
    """Index among the trajectories of the same task and policy."""
    seed: int = 0
    policy: str = ""
    """Identity of the policy that acted, such as `sft@1f0c…` or `expert`."""
    history: int | None = None
    """How many earlier turns the policy saw at each turn; None: all. `turns` nevertheless holds all of them."""
    taken_over: int = 0
    """How many turns another policy or expert had played in the episode before `policy` took over."""
    origin: int | None = None
    """Sample number of the resumed episode, where this episode branches from it; else None."""
    filled_context: bool | None = field(default=None, metadata=SPARSE)
    """True if the episode was truncated because the model's context left no room for another answer; else None."""
    user_said: tuple[str, ...] = field(default=(), metadata=SPARSE)
    """Texts of the user after the last turn; see `Turn.user_said`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, metadata=SPARSE)
    """Further variables for the chat template, such as `{"enable_thinking": False}`."""

    def __post_init__(self) -> None:
        for name, value in [("total_reward", self.total_reward)] + [
            (f"turns[{index}].reward", turn.reward) for index, turn in enumerate(self.turns)
        ]:
            if not math.isfinite(value):
                raise DataError(f"{name} of task {self.task.id!r} must be a finite number, got {value}.")
        if problem := misplaced(self.turns, self.history):
            raise DataError(f"task {self.task.id!r:.80}: {problem}.")

    @property
    def key(self) -> tuple[str, int]:
        """(task id, sample), the identity by which each episode is collected exactly once."""
        return self.task.id, self.sample

    @property
    def messages(self) -> list[Message]:
        """The whole conversation; for an episode of several sequences, all turns in the order they were taken."""
        conversation = list(self.prompt)
        for turn in self.turns:
            conversation += [*turn.observation, turn.action.message()]
        return conversation

    @property
    def is_linear(self) -> bool:
        """Whether each turn extends the context of the turn before it."""
        return all(self.parent(index) == index - 1 for index in range(len(self.turns)))

    def parent(self, index: int) -> int:
        """Return the index of the turn whose context a turn extends, or `OPENS`."""
        follows = self.turns[index].follows
        return index - 1 if follows is None else follows

    def seen_from(self, index: int) -> Trajectory:
        """Return the conversation in which a turn was taken: the turns whose contexts it extends, and the turn, last.

        The rewards and the outcome still count the whole episode.
        """
        chain = [index]
        while (before := self.parent(chain[-1])) != OPENS:
            chain.append(before)
        opening = self.turns[chain[-1]].opening or Opening(self.prompt, self.tools, self.template_kwargs)
        turns = tuple(replace(self.turns[at], follows=None, opening=None) for at in reversed(chain))
        return replace(
            self,
            turns=turns,
            prompt=opening.prompt,
            tools=opening.tools,
            template_kwargs=opening.template_kwargs,
        )

    @property
    def is_one_sequence(self) -> bool:
        """Whether the policy saw, at each turn, everything before it unchanged."""
        if not self.is_linear:
            return False
        if self.history is None:
            return True
        return len(self.turns) <= self.history + 1 and all(turn.recalled is None for turn in self.turns[:-1])


def failed(trajectory: Trajectory) -> bool:
    """Return whether the environment or the engine raised; such an episode stays in every denominator."""
    return trajectory.status is Status.FAILED


def unjudged(trajectory: Trajectory) -> bool:
    """Return whether an episode FAILED because a judge gave no rating, though it was played to its end."""
    return failed(trajectory) and (trajectory.error or "").startswith(JudgeFailure.__name__)


def unfinished(trajectory: Trajectory) -> bool:
    """Return whether the episode continues in the next iteration, so that its outcome is not known yet."""
    return trajectory.status is Status.UNFINISHED


def came_back(trajectory: Trajectory) -> bool:
    """Return whether the environment came back to the state from which the episode was to resume."""
    return len(trajectory.turns) >= trajectory.taken_over and not came_elsewhere(trajectory)


def came_elsewhere(trajectory: Trajectory) -> bool:
    """Return whether the environment failed to come back to the state from which the episode was to resume."""
    return failed(trajectory) and (trajectory.error or "").startswith(NotComeBack.__name__)


def score(trajectory: Trajectory) -> float:
    """Return the score of an episode: its total reward, or 0 if it FAILED."""
    return 0.0 if failed(trajectory) else trajectory.total_reward


def succeeded(trajectory: Trajectory) -> bool:
    """Return whether the task was solved; not if it FAILED, whatever its record says."""
    return trajectory.success and not failed(trajectory)


def are_factors(values: Sequence[float], count: int) -> bool:
    """Return whether these are the given number of values, each finite and above zero."""
    return len(values) == count and all(math.isfinite(each) and each > 0 for each in values)


@dataclass(frozen=True)
class WeightedTrajectory:
    """A trajectory with a weight for each turn, as a credit wrote it."""

    trajectory: Trajectory
    weight: tuple[float, ...]
    """Weight of each turn, without unit [turns]; an advantage where a baseline was taken off."""
    clip: tuple[float, ...] | None = field(default=None, metadata=SPARSE)
    """Factor on the clip range of each turn, > 0, without unit [turns]; None: 1."""
    own_turns: bool | None = field(default=None, metadata=SPARSE)
    """Whether the turns before `taken_over` carry no loss, as in a branch, since they carry loss in its `origin`. None:
    the credit of the training decides."""
    has_spread: bool | None = field(default=None, metadata=SPARSE)
    """Whether the weights of its group differ from 0. False: the trajectory counts in the KL to the reference alone,
    and not in the average of the clipped term. None: True."""

    def __post_init__(self) -> None:
        turns = len(self.trajectory.turns)
        if len(self.weight) != turns or not all(map(math.isfinite, self.weight)):
            raise DataError(
                f"task {self.trajectory.task.id!r}: expected a finite weight for each of its {turns} turns, "
                f"got {self.weight!r:.200}."
            )
        if self.clip is not None and not are_factors(self.clip, turns):
            raise DataError(
                f"task {self.trajectory.task.id!r}: expected a factor on the clip range, finite and > 0, for each of "
                f"its {turns} turns, got {self.clip!r:.200}."
            )
        if self.has_spread is False and any(self.weight):
            raise DataError(
                f"task {self.trajectory.task.id!r}: expected weights of 0 where has_spread is False, got "
                f"{self.weight!r:.200}. Set the weights to 0, or leave has_spread out."
            )


@dataclass(frozen=True)
class PreferencePair:
    """Two trajectories of one task, one preferred to the other."""

    chosen: Trajectory
    rejected: Trajectory


@dataclass(frozen=True)
class Prompt:
    """A conversation for an engine to continue, up to and including the newest observation."""

    messages: tuple[Message, ...]
    """Messages before the first turn."""
    turns: tuple[Turn, ...]
    """The turns played so far, or the last of them if the protocol shortens the history."""
    observation: tuple[Message, ...]
    """The newest observation."""
    seed: int
    """Seed of this action; equal prompts with equal seeds get equal answers, whatever else is in the batch."""
    conversation: str
    """Identity of the conversation, by which an engine may keep its keys and values."""
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""
    stop: tuple[str, ...] = ()
    """Texts that end this answer, besides the end of turn. The answer keeps the text that ended it."""
    response_format: Mapping[str, Any] | None = None
    """Form that the answer must have, as in the chat-completions protocol, for engines that can enforce it."""
    of_user: bool = False
    """Whether the answer is the user's, played by another model than the policy."""


@dataclass(frozen=True)
class UserTurn:
    """The user's turn, which an environment asks for: a model or a script speaks for the user."""

    instructions: str
    """Facts, wishes and conduct of the user, for the system text of the user's model."""
    heard: tuple[Message, ...]
    """The conversation as the user sees it: the agent's texts as messages of the role `user`, and the user's own as
    `assistant`. It ends with a message of the agent."""
    scripted: str | None = None
    """The user's text from a script; None: a model must play the user."""


@dataclass(frozen=True)
class Observation:
    """An environment's answer to `reset` and to each `step`."""

    text: str
    reward: float = 0.0
    """Reward of the action just taken. The rewards of an episode sum to its total reward."""
    terminated: bool = False
    success: bool = False
    """Whether the task is solved. Ending is not success."""
    valid: bool = True
    """Whether the environment understood the action."""
    state_key: str | None = None
    admissible: tuple[str, ...] = ()
    """Commands that the environment accepts now, if it lists them. A protocol decides whether the policy is told."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """In the answer to `reset`: schemas of the tools that the policy may call in this episode, in the chat-template
    form. An environment with tools receives its actions as `perturn.episodes.tool_calls.read_action` reads them."""
    results: tuple[str, ...] = ()
    """Results of the action's calls, one text per call in their order; `text` is then the user's next
    message, if anything."""
    user: UserTurn | None = None
    """Asks for the user's turn: the user's text is sent to `step`, and the policy sees the observation that `step`
    returns. None: `text` says all."""


class Environment(Protocol):
    """A world that poses tasks; it plays one episode at a time."""

    name: str
    """Name and version, stamped on every trajectory."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of a split, always in the same order."""
        ...

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; the text poses the task."""
        ...

    def step(self, action: str) -> Observation:
        """Take one action."""
        ...

    def close(self) -> None:
        """Release the resources of the environment."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Something that answers prompts."""

    name: str
    """Identity of the policy it serves, stamped on every trajectory."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action per prompt, in order; a prompt that cannot be answered gets its failure instead.

        A prompt that leaves no room for an answer in the model's context gets a `ContextFull`. It ends the episode as a
        turn limit does, where other failures make the episode FAILED.
        """
        ...

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        ...

    def close(self) -> None:
        """Release the resources of the engine."""
        ...


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that accepts prompts while it answers others, so that no prompt waits for a batch to end."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Accept prompts; no two of them at a time are of one conversation."""
        ...

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Work for a moment; return the prompts that were answered, and their answers."""
        ...
