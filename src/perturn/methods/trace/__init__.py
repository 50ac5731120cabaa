"""TRACE: branches at turns with uncertain success, and the predictor of success."""
