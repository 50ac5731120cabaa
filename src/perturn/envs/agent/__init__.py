"""Environment `agent`: a program of the user's, unchanged, that plays through an OpenAI-compatible endpoint."""
