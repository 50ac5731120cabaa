"""Selectors: in an evaluation, choose one of several episodes of a task, or one of several actions at a turn."""

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
"""Name of a selector -> its class, a frozen dataclass of settings. Other packages add selectors through entry
points."""
