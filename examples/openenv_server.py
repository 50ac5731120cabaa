"""OpenEnv server with a text environment that Perturn can play.

uvicorn openenv_server:app --port 8000     (in an environment with `pip install openenv==0.10.0`)
environment: {name: openenv, base_url: "http://localhost:8000", action_field: message, text_field: reply}
"""

from typing import Any

from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    """Action of the policy."""

    message: str


class Reply(Observation):
    """Reply of the environment."""

    reply: str


class Guess(Environment):
    """Environment in which a number from 1 to 12 is guessed by hearing 'higher' or 'lower'. The seed is the number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Reply:
        """Choose the number."""
        self.secret, self.said = (seed or 0) % 12 + 1, 0
        return Reply(reply="I think of a whole number from 1 to 12. Guess it.")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Reply:
        """Compare a guess with the number."""
        self.said += 1
        if not action.message.strip().isdecimal():
            return Reply(reply="Write a whole number.", reward=0.0)
        if (guess := int(action.message)) == self.secret:
            return Reply(reply="Right!", reward=1.0, done=True)
        return Reply(reply="higher" if guess < self.secret else "lower", reward=0.0)

    @property
    def state(self) -> State:
        """Number of guesses so far."""
        return State(step_count=self.said)


app = create_fastapi_app(Guess, Say, Reply, max_concurrent_envs=64)
