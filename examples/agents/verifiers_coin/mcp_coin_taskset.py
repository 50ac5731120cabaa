"""Coin task like coin_taskset.py, with its tool in an MCP toolset, for the bundled harness `null` (mcp.toml)."""

from collections.abc import Iterator

import verifiers.v1 as vf

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")


class CoinState(vf.State):
    """State of an episode: whether the coin was found."""

    found: bool = False


class CoinData(vf.TaskData):
    """Data of a task, with the place of the coin."""

    hidden: str


class GoTools(vf.Toolset[vf.ToolsetConfig, CoinState]):
    """Toolset with a single tool."""

    async def setup_task(self, data: CoinData) -> None:
        """Store the place of the coin."""
        self.hidden = data.hidden

    @vf.tool
    def go_to(self, place: str) -> str:
        """Go to a place and look for the coin."""
        self.state.found = self.state.found or place == self.hidden
        return "You find the coin." if place == self.hidden else "There is no coin here."


class CoinTask(vf.Task[CoinData, CoinState]):
    """Task to find the coin."""

    @classmethod
    def toolsets(cls, config):
        """Return a toolset, with a separate server for each episode."""
        return [GoTools(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 if the coin was found, else 0."""
        return float(trace.state.found)


class CoinTaskset(vf.Taskset[CoinTask, vf.TasksetConfig]):
    """Taskset with a single task."""

    def load(self) -> Iterator[CoinTask]:
        """Yield the task."""
        *others, hidden = PLACES
        prompt = f"You see a {', a '.join([*others, hidden])}. Your task is to: find the coin."
        yield CoinTask(CoinData(prompt=prompt, id="coin-0", hidden=hidden), self.config.task)


__all__ = ["CoinTaskset"]

if __name__ == "__main__":
    GoTools.run()
