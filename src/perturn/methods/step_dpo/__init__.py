"""Step-DPO: branches at the first wrong turn, and pairs of right and wrong turns."""
