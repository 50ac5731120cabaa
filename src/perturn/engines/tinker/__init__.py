"""The engine `tinker`, which samples through a service of the Tinker API; its connection also serves training."""
