"""The bias meter: how biased and how noisy a credit is, exactly, on small decision processes."""
