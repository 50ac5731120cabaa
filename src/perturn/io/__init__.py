"""Data in and out: read within limits, written whole or not at all."""
