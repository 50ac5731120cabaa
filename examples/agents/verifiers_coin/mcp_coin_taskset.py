"""The coin of coin_taskset.py, whose tool is a toolset behind MCP, for the bundled harness `null` (mcp.toml)."""

from collections.abc import Iterator

import verifiers.v1 as vf

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")


class CoinState(vf.State):
    """Whether the coin was found."""

    found: bool = False


class CoinData(vf.TaskData):
    """Where the coin is."""

    hidden: str


class GoTools(vf.Toolset[vf.ToolsetConfig, CoinState]):
    """One tool."""

    async def setup_task(self, data: CoinData) -> None:
        """Keep where the coin is."""
        self.hidden = data.hidden

    @vf.tool
    def go_to(self, place: str) -> str:
        """Go to a place and look for the coin."""
        self.state.found = self.state.found or place == self.hidden
        return "You find the coin." if place == self.hidden else "There is no coin here."


class CoinTask(vf.Task[CoinData, CoinState]):
    """Find the coin."""

    @classmethod
    def toolsets(cls, config):
        """One server for each episode."""
        return [GoTools(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        """Whether it was found."""
        return float(trace.state.found)


class CoinTaskset(vf.Taskset[CoinTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Iterator[CoinTask]:
        """Make the task."""
        *others, hidden = PLACES
        prompt = f"You see a {', a '.join([*others, hidden])}. Your task is to: find the coin."
        yield CoinTask(CoinData(prompt=prompt, id="coin-0", hidden=hidden), self.config.task)


__all__ = ["CoinTaskset"]

if __name__ == "__main__":
    GoTools.run()
