"""One episode of an agent: yield each of the agent's requests as a prompt, and pass the policy's answers back."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from perturn.envs.agent.agent_bridge import Line, Question
from perturn.envs.agent.agent_process import AgentProcess
from perturn.envs.agent.agent_replay import Replay
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.episode import Job
from perturn.errors import BudgetError, ContextFull, EngineFailure, EnvironmentFailure, NotComeBack
from perturn.io.plain_data import mismatch
from perturn.serve.agent_session import TURN_SEEDS
from perturn.types import Action, Message, Prompt

_GRACE_S = 10.0
"""Time that an agent has to exit after a limit is reached and its requests are rejected, in seconds."""
_EARLY_S = 60.0
"""Time for which the request of a later turn waits for the requests before it, in seconds, until another one comes."""
_REWARD = 'print a JSON line such as {"reward": 1.0} last, return it, or POST it to $PERTURN_SESSION/reward'


@dataclass(frozen=True)
class Limits:
    """Limits of an episode."""

    turns: int
    """Number of answers to the agent after which the episode ends."""
    tokens: int | None
    """Number of tokens of all answers after which the episode ends; None: no limit."""
    seconds: float
    """Largest running time of the agent, in seconds, without the time it waits for the policy."""


class Conversation:
    """The requests of an agent, answered one after the other until the agent exits or a limit is reached."""

    def __init__(self, limits: Limits, abilities: EngineAbilities) -> None:
        """Make the queue of requests.

        Args:
            limits: Limits of the episode.
            abilities: Abilities of the engine that answers; its token counts are read.
        """
        self.asked: SimpleQueue[Question | None] = SimpleQueue()
        """Requests of the agent; None means that the agent has exited."""
        self.turns = 0
        self.reached = ""
        """Description of the limit that was reached; empty if none was."""
        self.is_full = False
        """Whether the newest request was too long for the model's context window."""
        self.is_paused = False
        """Whether the episode stopped at a request, since it has all turns that were asked for."""
        self.rewards: tuple[float, ...] = ()
        """Rewards of the turns at the pause."""
        self._limits, self._abilities = limits, abilities
        self._early: list[Question] = []
        self._before: Question | None = None
        """Newest answered request, if its answer must be recorded before the next one."""
        self._answered: dict[int, tuple[Message, ...]] = {}
        """Identity -> new messages of each answered request; see `Question.is_with`."""
        self._tokens = 0
        self._left = limits.seconds

    def hold(self, job: Job, replay: Replay, line: Line) -> Generator[Prompt, Action, None]:
        """Yield each request as a prompt and answer it with the action that is sent back, until the agent exits.

        After a limit, new requests are rejected, and the agent has some seconds to exit.

        Args:
            job: The episode. The engine knows all prompts of the episode by `job.conversation`.
            replay: Recorded answers that the agent gets first.
            line: Session of the episode.

        Raises:
            EnvironmentFailure: If the agent exceeds the time limit, or does not come back to the turn.
            EngineFailure: If the policy cannot answer.
        """
        while (question := self._question(replay)) is not None:
            if question.is_abandoned():
                continue
            heard = question.prompt.observation
            is_begun = bool(heard) and id(heard) in self._answered
            if not is_begun:  # all answers to a request are given, or its client gets none of them
                self.reached = self.reached or self._reached()
            if not self.reached and not self.is_paused and replay.is_over(self.turns):
                self._await_recorded(line)
                self.is_paused, self.rewards = True, line.rewards()
            if (self.reached and not is_begun) or self.is_paused:
                self._left = min(self._left, _GRACE_S)
                why = self.reached or "the episode pauses here"
                question.answer(BudgetError(f"{why}; the agent is answered no more. End it."))
                continue
            prompt = question.prompt
            action = replay.answer(self.turns, prompt)
            is_again = action is not None
            try:
                if action is None:
                    seed = job.seed * TURN_SEEDS + self.turns  # a seed that the program sends is ignored
                    action = yield replace(prompt, conversation=job.conversation, seed=seed)
            except ContextFull as error:
                self.is_full = True
                question.answer(error)
                continue
            except EngineFailure as error:
                question.answer(error)
                raise
            if question.is_abandoned():
                continue  # the client has gone while the policy answered
            self.is_full = False
            if self._before is not None and not question.is_with(self._before):
                self._await_recorded(line)
            self.turns += 1
            counted = self._abilities.answer_tokens.get(job.conversation, 0)
            said = len(action.token_ids) if action.token_ids else counted
            self._tokens += said
            self._answered[id(heard)] = heard
            question.answer(action, self._abilities.prompt_tokens.get(job.conversation, 0), said)
            self._before = question if is_again or self._early else None

    def _await_recorded(self, line: Line) -> None:
        """Wait until the given answers are recorded, such as answers to parallel requests."""
        until = time.monotonic() + _GRACE_S
        while (count := line.turns()) is not None and count < self.turns and time.monotonic() < until:
            time.sleep(0.001)

    def _question(self, replay: Replay) -> Question | None:
        """Return the next request in the order of the recorded episode; None if the agent has exited.

        Requests that are sent at the same time may arrive in another order. A request whose turn comes later waits, but
        not for longer than `_EARLY_S` without another request: the agent may send nothing before it is answered.
        """
        is_compared = replay.is_compared(self.turns)
        for question in self._early:
            if not is_compared or replay.fits(self.turns, question.prompt):
                self._early.remove(question)
                return question
        while (found := self._next()) is not None and replay.comes_later(self.turns, found.prompt):
            self._early.append(found)
        return found

    def _next(self) -> Question | None:
        """Wait for the next request; return None if the agent has exited, or does not exit in time after a limit."""
        began = time.monotonic()
        longest = min(self._left, _EARLY_S) if self._early else self._left
        try:
            return self.asked.get(timeout=max(0.0, longest))
        except Empty:
            if self.reached or self.is_paused:
                return None
            if self._early:
                raise NotComeBack(
                    f"the agent did not come back to turn {self.turns}: it sent the request of a later turn, and no "
                    f"other request within {longest:g} seconds."
                ) from None
            raise EnvironmentFailure(
                f"the agent was killed: it worked for environment.seconds={self._limits.seconds:g} and had not ended; "
                "raise it if the agent is only slow."
            ) from None
        finally:
            self._left -= time.monotonic() - began

    def _reached(self) -> str:
        """Return a sentence on the limit that the episode has reached; empty if none."""
        if self.turns >= self._limits.turns:
            return f"the episode has reached protocol.max_turns={self._limits.turns}"
        if self._limits.tokens is not None and self._tokens >= self._limits.tokens:
            return f"the episode has reached environment.tokens={self._limits.tokens}"
        return ""


def settle(process: AgentProcess, held: Conversation, line: Line, *, prints: bool) -> dict[str, Any]:
    """Return the outcome of an episode after its agent has ended, as keyword arguments of `Line.finish`.

    Args:
        process: Process of the agent.
        held: Its requests.
        line: Its session.
        prints: Whether the agent printed the result, and not only returned it. A last line that is a number or a
            boolean may then be any output. A boolean is ignored, and a number if the agent posted a reward of the whole
            episode. A returned boolean is ignored if the agent posted a reward.

    Raises:
        EnvironmentFailure: If the agent crashed, made no request, or gave no valid reward.
    """
    is_cut = bool(held.reached) or held.is_full
    if process.code != 0 and not (is_cut and held.turns):
        raise EnvironmentFailure(f"the agent {process.ending()}.")
    if not held.turns:
        raise EnvironmentFailure(
            "the agent ended without a request to the policy; let it send its requests to $OPENAI_BASE_URL with the "
            "key $OPENAI_API_KEY, as OpenAI's clients do by themselves."
        )
    given = process.result() if process.code == 0 else None
    is_log = prints and not isinstance(given, Mapping) and line.turns() is None
    if isinstance(given, bool):
        is_log = prints or line.is_rewarded()
    found = {} if is_log else _reward(given)
    if not found and not is_cut and not line.is_rewarded():
        wrote, said = given.get("reward") if isinstance(given, Mapping) else None, "the agent gave no reward"
        if wrote is not None:
            said = f"reward of the agent: {mismatch('a number', wrote)}"
        raise EnvironmentFailure(f"{said}; {_REWARD}. It {process.ending()}.")
    return found | {"truncated": is_cut}


def _reward(given: Any) -> dict[str, Any]:
    """Return the reward and success in the value that an agent printed or returned; empty if it holds no reward.

    Raises:
        EnvironmentFailure: If the reward is a boolean, is not finite or is too large.
    """
    success = None
    if isinstance(given, Mapping):
        success, given = given.get("success"), given.get("reward")
    if isinstance(given, bool):
        raise EnvironmentFailure(f"reward of the agent: {mismatch('a number', given)}; write float({given}).")
    if not isinstance(given, int | float):
        return {}  # the value may be any log, and the agent may have posted its reward
    if success not in (None, True, False):
        raise EnvironmentFailure(f"success of the agent: {mismatch('true or false', success)}; {_REWARD}.")
    if abs(given) > 1e100 or not math.isfinite(
        given
    ):  # in this order, since a large int cannot be converted to float
        raise EnvironmentFailure(
            f"reward of the agent: {mismatch('a number of at most 1e100', given)}; {_REWARD}."
        )
    return {"reward": float(given), "success": None if success is None else bool(success)}
