"""Selectors: which of several episodes of a task, or of several actions at a turn, an evaluation takes, by name."""

from perturn.select.protocol import Selector, SelectorInputs, SelectorTraits, mean_logprob
from perturn.table import Table

__all__ = ["SELECTORS", "Selector", "SelectorInputs", "SelectorTraits", "mean_logprob"]

SELECTORS: Table[type[Selector]] = Table(
    "perturn.selectors",
    {
        "outcome": "perturn.select.outcome:Outcome",
        "likelihood": "perturn.select.likelihood:Likelihood",
        "frequency": "perturn.select.frequency:Frequency",
        "implicit-reward": "perturn.select.implicit_reward:ImplicitReward",
        "value": "perturn.select.value:Value",
    },
)
"""Selector by name: the frozen dataclass of its settings; other packages add theirs through entry points."""
