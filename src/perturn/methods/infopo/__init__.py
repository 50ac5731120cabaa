"""InfoPO: reward a turn for the information in the environment's reply to it."""
