"""Training in several processes of this machine. The driver of a run starts them with torchrun and follows them."""
