"""Data types: tasks, prompts, actions, turns, trajectories and pairs; and the Protocols of environments and engines.

The module imports the standard library alone. All data here can be written to JSON and read back (see `store.py`). The
rules of an episode are in `perturn.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from perturn.errors import ContextFull, DataError, EngineFailure, JudgeFailure, NotComeBack
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
    """Status of a recorded episode."""

    COMPLETED = "completed"
    """The episode ended by itself, or at a limit such as the maximum number of turns."""
    FAILED = "failed"
    """The environment or the engine raised an error; `Trajectory.error` has its text."""
    UNFINISHED = "unfinished"
    """The episode played its turns of this iteration (explorer `window`), and continues in the next iteration."""


@dataclass(frozen=True)
class Task:
    """One problem of an environment."""

    id: str
    """Name of the task, unique within the environment, such as `find-plant/12`."""
    kind: str = ""
    """Task type. Reports also give scores for each type."""
    split: str = "train"
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data from which the environment poses the task. If `answer` is a text, it is the gold answer."""


@dataclass(frozen=True)
class Trajectory:
    """One episode of one task, as recorded."""

    task: Task
    turns: tuple[Turn, ...]
    environment: str = ""
    """Name and version of the environment, such as `scienceworld-1.2.3`."""
    protocol: str = ""
    """Name of the protocol: the rules under which the episode was played."""
    prompt: tuple[Message, ...] = ()
    """Messages before the first observation: system text and worked examples. They never carry loss."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas given to the chat template."""
    total_reward: float = 0.0
    success: bool = False
    terminated: bool = False
    """Whether the environment ended the episode."""
    truncated: bool = False
    """Whether a limit ended the episode: the turn limit, or a full model context."""
    status: Status = Status.COMPLETED
    error: str | None = None
    """The error that ended the episode, as `Type: text`. A full model context truncates an episode; others fail it."""
    sample: int = 0
    """Sample number: index among the trajectories of the same task and policy."""
    seed: int = 0
    policy: str = ""
    """Identity of the policy that acted, such as `sft@1f0c…` or `expert`."""
    history: int | None = None
    """Number of earlier turns that the policy saw at each turn; None: all. `turns` holds all turns in any case."""
    taken_over: int = 0
    """Number of turns that another policy or an expert played in the episode before `policy` took over."""
    origin: int | None = None
    """Sample number of the episode from which this episode branches; None: it is no branch."""
    user_said: tuple[str, ...] = field(default=(), metadata=SPARSE)
    """Texts of the simulated user after the last turn; see `Turn.user_said`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, metadata=SPARSE)
    """Further variables for the chat template, such as `{"enable_thinking": False}`."""
    sharpened: bool = field(default=False, metadata=SPARSE)
    """Whether an action was sampled with `Sampling.sharpens`. Then it was not sampled with `Action.logprobs`."""

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
        """Pair (task id, sample number), which identifies the episode within a collection."""
        return self.task.id, self.sample

    @property
    def messages(self) -> list[Message]:
        """The whole conversation. In an episode of several sequences, turns stand in the order they were taken."""
        conversation = list(self.prompt)
        for turn in self.turns:
            conversation += [*turn.observation, turn.action.message()]
        return conversation

    @property
    def is_linear(self) -> bool:
        """Whether each turn extends the context of the turn before it."""
        return all(self.parent(index) == index - 1 for index in range(len(self.turns)))

    def parent(self, index: int) -> int:
        """Return the index of the turn whose context turn `index` extends; `OPENS` if it opens a new sequence."""
        follows = self.turns[index].follows
        return index - 1 if follows is None else follows

    def seen_from(self, index: int) -> Trajectory:
        """Return the sequence of turns that ends with turn `index`, as a trajectory with the prompt of this sequence.

        The total reward and the outcome still describe the whole episode.
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
        """Whether the policy saw the whole earlier conversation, unchanged, at each turn."""
        if not self.is_linear:
            return False
        if self.history is None:
            return True
        return len(self.turns) <= self.history + 1 and all(turn.recalled is None for turn in self.turns[:-1])


def failed(trajectory: Trajectory) -> bool:
    """Return whether the environment or the engine raised an error. FAILED episodes still count in every average."""
    return trajectory.status is Status.FAILED


def unjudged(trajectory: Trajectory) -> bool:
    """Return whether an episode was played to its end, but FAILED because a judge gave no rating."""
    return failed(trajectory) and _has_error(trajectory, JudgeFailure)


def filled_context(trajectory: Trajectory) -> bool:
    """Return whether an episode was truncated because the model's context had no room for another answer."""
    return trajectory.truncated and not failed(trajectory) and _has_error(trajectory, ContextFull)


def unfinished(trajectory: Trajectory) -> bool:
    """Return whether the episode continues in the next iteration; its outcome is not known yet."""
    return trajectory.status is Status.UNFINISHED


def came_back(trajectory: Trajectory) -> bool:
    """Return whether the environment restored the state from which the episode was to resume."""
    return len(trajectory.turns) >= trajectory.taken_over and not came_elsewhere(trajectory)


def came_elsewhere(trajectory: Trajectory) -> bool:
    """Return whether the environment failed to restore the state from which the episode was to resume."""
    return failed(trajectory) and _has_error(trajectory, NotComeBack)


def _has_error(trajectory: Trajectory, kind: type[Exception]) -> bool:
    """Return whether the error of an episode names this type, as `Type: text`."""
    return (trajectory.error or "").partition(":")[0] == kind.__name__


def score(trajectory: Trajectory) -> float:
    """Return the score of an episode: its total reward, or 0 if it FAILED."""
    return 0.0 if failed(trajectory) else trajectory.total_reward


def has_outcome(trajectory: Trajectory) -> bool:
    """Return whether an episode was played or scored. A conversation from a file of rows has no outcome."""
    return bool(trajectory.environment or trajectory.policy or trajectory.total_reward or trajectory.success)


def succeeded(trajectory: Trajectory) -> bool:
    """Return whether the episode solved its task. A FAILED episode did not, whatever its `success` says."""
    return trajectory.success and not failed(trajectory)


def are_factors(values: Sequence[float], count: int) -> bool:
    """Return whether there are exactly `count` values, each finite and above 0."""
    return len(values) == count and all(math.isfinite(each) and each > 0 for each in values)


@dataclass(frozen=True)
class WeightedTrajectory:
    """A trajectory with the weight that a credit gave each turn."""

    trajectory: Trajectory
    weight: tuple[float, ...]
    """Weight of each turn, without unit [turns]. If the credit subtracts a baseline, the weight is an advantage."""
    clip: tuple[float, ...] | None = field(default=None, metadata=SPARSE)
    """Factor on the clip range of each turn, > 0, without unit [turns]; None: 1."""
    own_turns: bool | None = field(default=None, metadata=SPARSE)
    """Whether the turns before `taken_over` carry no loss, as in a branch. These turns carry loss in the explored
    episode. None: the credit of the training decides."""
    has_spread: bool | None = field(default=None, metadata=SPARSE)
    """Whether the group of the trajectory has weights other than 0. False: the trajectory counts in the KL to the
    reference, but not in the average of the clipped term. None: True."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", tuple(map(float, self.weight)))
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
    """Two trajectories of one task: `chosen` is preferred to `rejected`."""

    chosen: Trajectory
    rejected: Trajectory


@dataclass(frozen=True)
class Prompt:
    """A conversation for an engine to continue, up to and including the newest observation."""

    messages: tuple[Message, ...]
    """Messages before the first turn."""
    turns: tuple[Turn, ...]
    """Turns played so far, or only the last turns if the protocol shortens the history."""
    observation: tuple[Message, ...]
    """The newest observation."""
    seed: int
    """Seed for sampling this action. Equal prompts with equal seeds get equal answers in any batch."""
    conversation: str
    """Identity of the conversation; an engine may keep a KV cache for it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""
    stop: tuple[str, ...] = ()
    """Texts that end this answer, besides the end-of-turn token. The answer includes the text that ended it."""
    response_format: Mapping[str, Any] | None = None
    """Required format of the answer, as in the chat-completions API, for engines that can enforce it."""
    of_user: bool = False
    """Whether the prompt asks for the simulated user's answer, from another model than the policy."""


@dataclass(frozen=True)
class UserTurn:
    """Request of an environment for a text of the simulated user, who is played by a model or a script."""

    instructions: str
    """Facts, wishes and behavior of the user, for the system text of the user's model."""
    heard: tuple[Message, ...]
    """Conversation as the user sees it: the agent's texts have the role `user`, and the user's texts have the role
    `assistant`. It ends with a message of the agent."""
    scripted: str | None = None
    """Text of the user from a script; None: a model must play the user."""


@dataclass(frozen=True)
class Observation:
    """Result of an environment's `reset` and of each `step`."""

    text: str
    reward: float = 0.0
    """Reward of the action just taken. The rewards of an episode sum to its total reward."""
    terminated: bool = False
    success: bool = False
    """Whether the task is solved. An episode can end without success."""
    valid: bool = True
    """Whether the environment understood the action."""
    state_key: str | None = None
    """Key of the environment's state at this observation. Equal keys mean the same state. None: not known."""
    admissible: tuple[str, ...] = ()
    """Commands that the environment accepts now, if it lists them. The protocol decides if the policy sees them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the policy may call in this episode, in the form of chat templates; only in the result
    of `reset`. Such an environment parses its actions with `perturn.episodes.tool_calls.read_action`."""
    results: tuple[str, ...] = ()
    """Results of the action's tool calls, one text per call, in the order of the calls. `text` is then the user's next
    message, or empty."""
    user: UserTurn | None = None
    """Request for the user's turn. The user's text is passed to `step`, and the policy sees the observation that `step`
    returns. None: no request."""


class Environment(Protocol):
    """Environment that poses tasks; one object plays one episode at a time."""

    name: str
    """Name and version of the environment, recorded in every trajectory."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of a split, always in the same order."""
        ...

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode, and return the observation that poses the task."""
        ...

    def step(self, action: str) -> Observation:
        """Execute one action, and return the resulting observation."""
        ...

    def close(self) -> None:
        """Release the resources of the environment."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Inference engine that answers prompts."""

    name: str
    """Identity of the served policy, recorded in every trajectory."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action per prompt, in order, or an `EngineFailure` for a prompt that cannot be answered.

        If the model's context has no room for an answer, the failure is a `ContextFull`, which truncates the episode
        like a turn limit. Any other failure makes the episode FAILED.
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
    """Engine that accepts new prompts while it answers others, so no prompt waits for the end of a batch."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Accept prompts. A conversation never has two unanswered prompts."""
        ...

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Compute for a short time, and return the prompts that got an answer, with their answers."""
        ...
