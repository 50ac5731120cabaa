"""tau3-bench: service agents that talk with a simulated user and change a database by tools."""
