"""The stages as functions on objects, without a recipe and a run folder: for notebooks and scripts.

Each does by the same code what its stage of a run does. What a folder gives is not here: resuming, the record of
versions, the report.
"""

from perturn.api.episodes import Score, collect, evaluate
from perturn.api.learn import assign_credit, make_pairs, train, weigh

__all__ = ["Score", "assign_credit", "collect", "evaluate", "make_pairs", "train", "weigh"]
