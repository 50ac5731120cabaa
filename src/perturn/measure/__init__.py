"""Values of recorded turns, by continuations of their episodes, and scores of credits against them."""
