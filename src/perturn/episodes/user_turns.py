"""Play the user's turns that an environment asks for, with a model, a script or recorded texts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from perturn.episodes.calls.find_calls import words_after_thought
from perturn.episodes.job import Job
from perturn.errors import EnvironmentFailure
from perturn.faults import sound
from perturn.io.plain_data import mended
from perturn.types import Action, Environment, EpisodeProtocol, Observation, Prompt, UserTurn

_MOST = 8
"""Largest number of times that the user may speak between two turns of the policy."""
_SEED = 500_000
"""Difference between the seed of the user's model and the seed of the policy's action."""


class User:
    """The user of one episode."""

    def __init__(
        self, env: Environment, job: Job, protocol: EpisodeProtocol, recorded: Sequence[Sequence[str]]
    ) -> None:
        """Create the user of an episode before its first turn.

        Args:
            env: The episode's environment.
            job: The episode.
            protocol: Rules of the episode, with the user's model if there is one.
            recorded: Recorded texts of the user before each turn of the policy, which are used again.
        """
        self._env, self._job, self._user, self._recorded = env, job, protocol.user, recorded
        self.said: tuple[str, ...] = ()
        """The user's texts before the newest observation."""

    def speak(self, seen: Observation, turn: int) -> Generator[Prompt, Action, Observation]:
        """Let the user speak while the environment asks for the user's turn, and return the next observation.

        Args:
            seen: The environment's answer to `reset`, or to the policy's action.
            turn: Index of the policy's next turn.

        Raises:
            EnvironmentFailure: If no model and no script plays the user, the model gives no text, or the environment
                asks for the user's turn too often in a row.
        """
        self.said = ()
        while seen.user is not None and not seen.terminated:
            if len(self.said) == _MOST:
                raise EnvironmentFailure(
                    f"{self._env.name} handed over the user's turn more than {_MOST} times in a row. Remedy: return an "
                    "Observation without `user` once the user has spoken."
                )
            text = self._again(turn)
            if text is None:
                text = seen.user.scripted if self._user is None else (yield from self._ask(seen.user, turn))
            if text is None:
                raise EnvironmentFailure(
                    f"{self._env.name} hands over the user's turn, and nobody plays the user; set user, such as "
                    "user={model: gpt-4.1-mini}."
                )
            text = mended(text)
            self.said += (text,)
            answer = sound(self._env.step(text), "step with what the user said")
            seen = replace(
                answer,
                tools=seen.tools,
                results=seen.results,
                valid=seen.valid,
                reward=seen.reward + answer.reward,
            )
        return seen

    def _again(self, turn: int) -> str | None:
        """Return the user's recorded text for this point of the episode; None if there is none."""
        texts = self._recorded[turn] if turn < len(self._recorded) else ()
        return texts[len(self.said)] if len(self.said) < len(texts) else None

    def _ask(self, asked: UserTurn, turn: int) -> Generator[Prompt, Action, str]:
        """Let the user's model speak, and return its words without thoughts.

        Raises:
            EnvironmentFailure: If nothing but thoughts came.
        """
        answer = yield self._prompt(asked, turn)
        words = words_after_thought(answer.text)
        if not words:
            raise EnvironmentFailure("the user's model gave no text; raise user.sampling.max_new_tokens.")
        return words

    def _prompt(self, asked: UserTurn, turn: int) -> Prompt:
        """Return the prompt of the user's model."""
        assert self._user is not None
        *before, newest = asked.heard
        system = {"role": "system", "content": self._user.system(asked.instructions)}
        return Prompt(
            messages=(system, *before),
            turns=(),
            observation=(newest,),
            seed=self._job.seed * 1_000_003 + _SEED + turn * _MOST + len(self.said),
            conversation=self._job.conversation,
            of_user=True,
        )
