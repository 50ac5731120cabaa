"""The stages as functions on objects, without a recipe and a run folder: for notebooks and scripts.

Each function runs the same code as its stage in a run. Only a run folder gives resuming, the record of versions and the
report.
"""

from perturn.api.episodes import Score, collect, evaluate
from perturn.api.make_rows import make_rows
from perturn.api.trainer import Trainer, train
from perturn.api.weighing import weigh

__all__ = ["Score", "Trainer", "collect", "evaluate", "make_rows", "train", "weigh"]
