"""`TurnTrainer` and its parts: settings, rows, turn weights, metrics, evaluation and sharding."""
