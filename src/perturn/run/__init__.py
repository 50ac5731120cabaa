"""The loop as data, the session that opens each thing once, and the stages."""
