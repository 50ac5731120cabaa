"""The stages as functions on objects, without a recipe and a run folder: for notebooks and scripts.

Each does by the same code what its stage of a run does. What a folder gives is not here: resuming, the record of
versions, the report.
"""

from perturn.run.direct.learning import assign_credit, make_pairs, train, weigh
from perturn.run.direct.playing import Score, collect, evaluate

__all__ = ["Score", "assign_credit", "collect", "evaluate", "make_pairs", "train", "weigh"]
