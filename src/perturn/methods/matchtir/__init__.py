"""MatchTIR: tool calls matched with gold calls."""
