"""TRACE: branches where success is uncertain, and the predictor of success."""
