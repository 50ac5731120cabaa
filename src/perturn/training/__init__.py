"""TurnTrainer and its parts: rows, weights, metrics, evaluation."""
