"""What each turn of recorded episodes was worth, by continuations of them, and how well each credit finds it."""
