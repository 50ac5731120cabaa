"""The engine that samples through a service of the Tinker API, and the connection that training shares with it."""
