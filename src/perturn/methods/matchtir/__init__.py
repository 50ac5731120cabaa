"""MatchTIR: reward tool calls by their similarity to the task's gold calls."""
