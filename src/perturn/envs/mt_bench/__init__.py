"""Environment `mt-bench`: questions with a follow-up question, whose two answers a judge model rates."""
