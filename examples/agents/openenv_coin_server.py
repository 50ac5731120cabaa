"""OpenEnv server with a tool (MCP): find a coin by going to places. The seed decides where the coin is.

uvicorn openenv_coin_server:app --port 8000     (in this folder, in an environment with `pip install openenv==0.10.0`)
"""

import re
from itertools import permutations
from typing import Any

from fastmcp import FastMCP
from openenv.core import Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")
ORDERS = list(permutations(PLACES))
TURNS = 4
FOUND = "You find the coin."


class Posed(Observation):
    """First observation of the policy."""

    prompt: str


class Coin(MCPEnvironment):
    """Environment in which one place hides the coin. Finding it pays 1, and a call that names a place pays 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        """Register the tool."""
        server = FastMCP("coin")

        @server.tool
        def go_to(place: str) -> str:
            """Go to a place and look for the coin."""
            named = re.search(r"(cabinet|drawer|shelf) \d", place)
            self.looked.append(named[0] if named else "")
            return FOUND if self.looked[-1] == self.hidden else "There is no coin here."

        super().__init__(server)
        self.hidden, self.looked = PLACES[0], []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Posed:
        """Hide the coin."""
        places = ORDERS[(seed or 0) % len(ORDERS)]
        self.hidden, self.looked = places[-1], []
        return Posed(
            prompt=f"You see a {', a '.join(places)}. Find the coin: call go_to with one place at a time."
        )

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call the tool, and set the reward of the call."""
        seen = await super().step_async(action, timeout_s, **kwargs)
        return self.paid(seen) if isinstance(action, CallToolAction) else seen

    def paid(self, seen: CallToolObservation) -> CallToolObservation:
        """Set the reward and the end of a call."""
        last = self.looked[-1] if self.looked else ""
        found = last == self.hidden
        seen.reward = float(found) + 0.1 * sum(map(bool, self.looked))
        seen.done = found or len(self.looked) >= TURNS
        return seen

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("call a tool")

    @property
    def state(self) -> State:
        """Number of calls so far."""
        return State(step_count=len(self.looked))


app = create_fastapi_app(Coin, CallToolAction, CallToolObservation, max_concurrent_envs=64)
