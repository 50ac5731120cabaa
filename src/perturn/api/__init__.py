"""The stages of a run as Python functions on objects, without a recipe or a run folder, for notebooks and scripts.

Each function runs the same code as its stage in a run. Resuming, the record of versions and the report need a run
folder.
"""

from perturn.api.collect_and_evaluate import Score, collect, evaluate
from perturn.api.row_making import make_rows
from perturn.api.trainer import Trainer, train
from perturn.api.weighing import weigh

__all__ = ["Score", "Trainer", "collect", "evaluate", "make_rows", "train", "weigh"]
