"""Settings that make a recipe small."""

SHRUNK = [
    "environment.train_games=48",
    "base.tasks={split: train, n: 16, skip: 32}",
    "base.shape={hidden: 16, layers: 1, heads: 2, mlp: 32, context: 1024}",
    "base.epochs=1",
    "base.batch_size=8",
    "sft.tasks={split: train, n: 8, skip: 32}",
    "explore.tasks={split: train, n: 4, skip: 32}",
    "explore.per_iteration=2",
    "explore.samples=2",
    "explore.name=expert-branches",
    "explore.every=2",
    "explore.branches=2",
    "evaluate.tasks={split: valid_seen, n: 2}",
]
