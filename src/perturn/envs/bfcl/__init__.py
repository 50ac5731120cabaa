"""Environment `bfcl`: the multi-turn tasks of the Berkeley Function Calling Leaderboard, with native tool calls."""
