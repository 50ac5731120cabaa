"""InfoPO: how much the reply of the environment tells of the next action."""
