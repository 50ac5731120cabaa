"""MT-Bench: questions of two turns, whose answers a judge rates."""
