"""Bias meter: measure the bias and the noise of a credit exactly, on small decision processes."""
