"""ALFWorld: the official games read and played in pure Python, the official engine, and generated games."""
