"""SPA: learned contributions of turns to the score of their episode."""
