"""Wrapper that answers for the simulated user of an environment, for code that calls `step` directly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perturn.types import Observation, Task

_WITHOUT_SCRIPT = "Yes, please."
_MOST = 8
"""Largest number of user turns in a row."""


class ScriptedUser:
    """An environment whose user turns are answered at once, from the task's script or with "Yes, please."."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # copy.copy reads attributes before __init__ has run
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; return the policy's first observation."""
        seen: Observation = self._spoken(self._env.reset(task, seed))
        return seen

    def step(self, action: str) -> Observation:
        """Take one action; return the policy's next observation."""
        seen: Observation = self._spoken(self._env.step(action))
        return seen

    def _spoken(self, seen: Any) -> Any:
        for _ in range(_MOST):
            if not isinstance(seen, Observation) or seen.user is None or seen.terminated:
                return seen
            said = _WITHOUT_SCRIPT if seen.user.scripted is None else seen.user.scripted
            answer = self._env.step(said)
            if not isinstance(answer, Observation):
                return answer
            kept = replace(answer, tools=seen.tools, results=seen.results, valid=seen.valid)
            seen = replace(kept, reward=seen.reward + answer.reward)
        return seen
