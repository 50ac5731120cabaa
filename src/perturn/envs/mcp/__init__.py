"""MCP servers as the tools of tasks of the user's own."""
