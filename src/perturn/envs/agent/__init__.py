"""Environment `agent`: the user's own agent program, which calls the policy at an OpenAI-compatible endpoint."""
