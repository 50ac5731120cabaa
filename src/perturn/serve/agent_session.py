"""One session of an agent: collect its turns, and make a trajectory of them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from numbers import Real
from typing import Any

from perturn.episodes.prefix_matching import Position, Sequences
from perturn.io.plain_data import mismatch
from perturn.serve.exchange import Answer, Ask, Call, Refusal
from perturn.serve.request_parser import RequestParser
from perturn.turns import OPENS, Opening
from perturn.types import Message, Prompt, Sampling, Status, Task, Trajectory, Turn

TURN_SEEDS = 1_000_003
"""Turn k of an episode with seed s is sampled with seed s * TURN_SEEDS + k, as in episodes that Perturn plays."""


@dataclass
class _Taken:
    """A turn whose answer is recorded."""

    position: Position
    """Turn that this turn continues, and the new messages."""
    opening: Opening
    """Prompt, tools and template variables of the conversation."""
    turn: Turn
    conversation: str
    """Name that the engine uses for the conversation."""
    calls: tuple[Call, ...] = ()
    """Tool calls of the answer, with the ids that the client knows them by."""
    reward: float | None = None
    """Reward that the agent posted for the turn; None if it posted none."""

    def answer(self) -> Message:
        """Return the answer as a message, with the ids of its calls, by which a client names their results."""
        message = self.turn.action.message()
        calls = zip(message.get("tool_calls", ()), self.calls, strict=True)
        return {
            **message,
            **({"tool_calls": [{**call, "id": known.id} for call, known in calls]} if self.calls else {}),
        }


@dataclass
class Session:
    """An episode of an agent."""

    id: str
    """Name of the session."""
    task: Task
    number: int
    """Unique number among the endpoint's sessions."""
    sample: int = 0
    """Number of the episode among the episodes of its task."""
    seed: int = 0
    """Seed of the episode."""
    sampling: Sampling | None = None
    """Sampling settings of all answers; None: the settings in each request."""
    reads_thoughts: bool = True
    """Whether the policy reads the thoughts of earlier turns."""
    parser: RequestParser = field(default_factory=RequestParser)
    is_automatic: bool = False
    """Whether the session's requests name no session, so that they are assigned to it by their conversation."""
    reward: float | None = None
    """Reward of the whole episode, in addition to the rewards of single turns; None: not given."""
    success: bool | None = None
    """Whether the task is solved, as the agent posted it; None: not posted."""
    next_state: str | None = None
    """State key that the agent posted for the next request."""
    unrecorded: tuple[str, Trajectory] | None = None
    """Reason of the end, and the episode, if it could not be recorded yet. A further turn or reward clears it."""
    sharpened: bool = False
    """Whether an answer was sampled with `Sampling.sharpens`."""
    in_flight: int = 0
    """Number of answers that the engine is sampling."""
    full_context: str | None = None
    """The engine's error if the newest request was too long for the model's context window; else None."""
    opened: float = field(default_factory=time.monotonic)
    """Time of the opening, in seconds of the monotonic clock."""
    touched: float = field(default_factory=time.monotonic)
    """Time of the last answer, reward or state, in seconds of the monotonic clock."""
    breaks: Counter[str] = field(default_factory=Counter)
    """Cause -> number of requests that continued no recorded conversation, but started a new conversation."""

    def __post_init__(self) -> None:
        self._sequences = Sequences(reads_thoughts=self.reads_thoughts)
        self._taken: list[_Taken] = []
        self._heads: dict[str, int] = {}  # conversation -> index of its newest turn
        self._busy: dict[str, int] = {}  # conversation of a prompt in flight -> its seed
        self._states: dict[str, str] = {}  # conversation of a request's first prompt in flight -> state key
        self._newest = ""  # conversation of the newest request's first prompt
        self._seeds: set[int] = set()  # of recorded turns
        self._begun = 0
        self._of_response: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def agents(self) -> int:
        """Estimated number of agents that use this session; see `Sequences.agents`."""
        return self._sequences.agents

    @property
    def responses(self) -> list[str]:
        """Ids of the responses in this session."""
        return list(self._of_response)

    @property
    def conversations(self) -> list[str]:
        """Names that the engine uses for the session's conversations."""
        return [f"{self.id}#{index}" for index in range(self._begun)]

    def position(self) -> Position:
        """Return which recorded turn the last read request continues."""
        return self.parser.position(self._sequences)

    def begin(self, position: Position, ask: Ask) -> list[Prompt]:
        """Start a request: return one prompt for each requested answer. The request takes the posted state key.

        Args:
            position: Recorded turn that the request continues, and its new messages.
            ask: The request.
        """
        self.sharpened |= (self.sampling or Sampling(ask.temperature, ask.top_p)).sharpens
        chain = self._chain(position.follows)
        opening = chain[0].opening if chain else Opening(position.prompt, ask.tools, ask.template_kwargs)
        first = self.seed * TURN_SEEDS + len(self) + self.in_flight
        used = self._seeds.union(self._busy.values())
        derived = (seed for seed in count(first) if seed not in used)
        prompts = []
        for choice in range(ask.n):
            prompts.append(
                Prompt(
                    opening.prompt,
                    tuple(each.turn for each in chain),
                    position.heard,
                    next(derived) if ask.seed is None else ask.seed + choice,
                    self._conversation(position.follows),
                    opening.tools,
                    opening.template_kwargs,
                    ask.stop,
                    ask.response_format,
                )
            )
            self._busy[prompts[-1].conversation] = prompts[-1].seed
        if self.next_state is not None:
            self._states[prompts[0].conversation], self.next_state = self.next_state, None
        self._newest = prompts[0].conversation
        self.in_flight += ask.n
        return prompts

    def end(self, prompts: Sequence[Prompt]) -> None:
        """Mark the prompts of a request as finished.

        If none is recorded, the next request gets their state key, unless another request began meanwhile.
        """
        self.in_flight -= len(prompts)
        for prompt in prompts:
            del self._busy[prompt.conversation]
        state = self._states.pop(prompts[0].conversation, None)
        if self.next_state is None and not self.in_flight and self._newest == prompts[0].conversation:
            self.next_state = state
        self.touched = time.monotonic()

    def record(
        self, response: str, position: Position, prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> list[int]:
        """Record the answers to a request as turns with the same state key, before `end`; return the turns' indices.

        Args:
            response: Id of the response.
            position: Recorded turn that the request continues, and its new messages.
            prompts: Prompts that were answered.
            answers: One answer for each prompt.
        """
        self.unrecorded = None
        state = self._states.pop(prompts[0].conversation, None)
        if position.broke is not None:
            self.breaks[position.broke.cause] += 1
        self._of_response[response] = [
            self._record(position, prompt, answer, state)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return self._of_response[response]

    def _record(self, position: Position, prompt: Prompt, answer: Answer, state: str | None) -> int:
        action = answer.action
        message = action.message()
        given: Message = {**message, "content": answer.text}
        opening = Opening(prompt.messages, prompt.tools, prompt.template_kwargs)
        turn = Turn(position.heard, action, state_key=state)
        forms = (message,) if given == message else (message, given)
        index = self._sequences.add(position, *forms)
        self._taken.append(_Taken(position, opening, turn, prompt.conversation, answer.calls))
        self._heads[prompt.conversation] = index
        self._seeds.add(prompt.seed)
        return index

    def is_continued(self, key: tuple[bytes, tuple[str, str]]) -> bool:
        """Return whether all turns that end a conversation are continued; see `end_keys`."""
        return self._sequences.is_continued(key)

    def give_state(self, state: str | None) -> None:
        """Set the state key of the next request."""
        self.next_state, self.touched = state, time.monotonic()

    def end_keys(self, index: int) -> list[tuple[bytes, tuple[str, str]]]:
        """Return the keys that identify the conversation up to a turn's answer, across all sessions."""
        return self._sequences.end_keys(index)

    @property
    def all_end_keys(self) -> list[tuple[bytes, tuple[str, str]]]:
        """Keys of the conversations up to each answer of this session; see `end_keys`."""
        return [key for index in range(len(self)) for key in self.end_keys(index)]

    def conversation_up_to(self, response: str) -> list[Message]:
        """Return all messages up to and including the answer of a response.

        Raises:
            Refusal: If this session has no such response.
        """
        index = self._turn_of(response, 0)
        chain = self._chain(index)
        said = [message for each in chain for message in (*each.turn.observation, each.answer())]
        return [*chain[0].opening.prompt, *said]

    def give_reward(self, reward: Any, response: str | None = None, choice: int | None = None) -> None:
        """Set the reward of the episode, or of the turn of a response.

        Args:
            reward: A finite number.
            response: Id of the response; None: the whole episode.
            choice: Index of the turn among the response's choices; None: its only choice, or its only continued choice.

        Raises:
            Refusal: If there is no such turn, or the reward is not a finite number.
        """
        is_number = isinstance(reward, Real) and not isinstance(reward, bool)
        if not is_number or abs(reward) > 1e100 or not math.isfinite(reward):
            raise Refusal(400, f"reward: {mismatch('a finite number', reward)}.", "invalid_reward", "reward")
        self.touched = time.monotonic()
        if response is None:
            self.reward = float(reward)
        else:
            self._taken[self._turn_of(response, choice)].reward = float(reward)

    def trajectory(self, *, policy: str, environment: str, **outcome: Any) -> Trajectory:
        """Return the episode as recorded so far.

        Args:
            policy: Name of the policy that answered.
            environment: Name of the agent's environment.
            outcome: Further fields of the trajectory, such as `truncated` or `status`.
        """
        first = self._taken[0].opening if self._taken else Opening()
        turns = [self._turn(index, each, first) for index, each in enumerate(self._taken)]
        if turns and self.reward:
            turns[-1] = replace(turns[-1], reward=turns[-1].reward + self.reward)
        total = math.fsum(turn.reward for turn in turns)
        judged = total if self.reward is None else self.reward
        success = judged >= 1 if self.success is None else self.success
        if outcome.get("truncated") and self.full_context:
            outcome |= {"error": self.full_context} | ({} if turns else {"status": Status.FAILED})
        return Trajectory(
            task=self.task,
            turns=tuple(turns),
            environment=environment,
            protocol="agent",
            prompt=first.prompt,
            tools=first.tools,
            template_kwargs=first.template_kwargs,
            total_reward=total,
            success=success and bool(turns) and outcome.get("status") is not Status.FAILED,
            sample=self.sample,
            seed=self.seed,
            policy=policy,
            sharpened=self.sharpened,
            **outcome,
        )

    def summary(self) -> dict[str, Any]:
        """Return the state of the session as JSON data, for `GET /s/ID`."""
        return {
            "session": self.id,
            "task": self.task.id,
            "sample": self.sample,
            "seed": self.seed,
            "turns": len(self),
            "sequences": sum(each.position.follows == OPENS for each in self._taken),
            "breaks": dict(self.breaks),
            "agents": self.agents,
            "in_flight": self.in_flight,
            "reward": self.reward,
            "recorded": [self._shown(index, each) for index, each in enumerate(self._taken)],
        }

    def _shown(self, index: int, taken: _Taken) -> dict[str, Any]:
        response = next(key for key, turns in self._of_response.items() if index in turns)
        broke = taken.position.broke
        return {
            "response": response,
            "follows": taken.position.follows,
            "broke": None if broke is None else {"cause": broke.cause, "message": broke.message},
            "state": taken.turn.state_key,
            "reward": taken.reward,
            "tokens": len(taken.turn.action.token_ids or ()),
            "text": taken.turn.action.text[:200],
            "calls": [{"name": call.name, "arguments": call.arguments[:200]} for call in taken.calls],
        }

    def _turn(self, index: int, taken: _Taken, first: Opening) -> Turn:
        """Return a turn in the form in which trajectories store it.

        Args:
            index: Index of the turn.
            taken: The turn.
            first: Opening of the first turn.
        """
        parent = taken.position.follows
        return replace(
            taken.turn,
            reward=taken.reward or 0.0,
            follows=None if parent == index - 1 else parent,
            opening=taken.opening if index and parent == OPENS and taken.opening != first else None,
        )

    def _turn_of(self, response: str, choice: int | None) -> int:
        """Return the index of the turn that a choice of a response is; see `give_reward`."""
        if response not in self._of_response:
            raise Refusal(
                404, f"session {self.id!r} gave no response {response!r:.80}.", "not_found", "response"
            )
        turns = self._of_response[response]
        if choice is None and len(turns) > 1:
            continued = {each.position.follows for each in self._taken}.intersection(turns)
            if len(continued) != 1:
                said = f"{len(turns)} choices, and {len(continued)} of them are continued; give choice."
                raise Refusal(400, f"response {response!r:.80} has {said}", "invalid_value", "choice")
            return continued.pop()
        if (choice or 0) >= len(turns):
            said = f"choice must be < {len(turns)}, the number of choices of the response, got {choice}."
            raise Refusal(400, said, "invalid_value", "choice")
        return turns[choice or 0]

    def _chain(self, index: int) -> list[_Taken]:
        """Return the turns of a conversation up to the turn with an index, in order."""
        chain = []
        while index != OPENS:
            chain.append(self._taken[index])
            index = self._taken[index].position.follows
        return chain[::-1]

    def _conversation(self, follows: int) -> str:
        """Return the engine's name for the conversation that a new turn continues.

        If that turn is not the newest of its conversation, or the conversation is in use, the name is new.

        Args:
            follows: Index of the continued turn, or `OPENS`.
        """
        if follows != OPENS:
            name = self._taken[follows].conversation
            if self._heads[name] == follows and name not in self._busy:
                return name
        self._begun += 1
        return f"{self.id}#{self._begun - 1}"
