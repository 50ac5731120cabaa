"""Environment `mcp`: the user's own tasks, solved with the tools of MCP servers."""
