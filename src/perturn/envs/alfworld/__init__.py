"""ALFWorld: official games in a pure-Python engine, the official engine, and generated games that resemble ALFWorld."""
