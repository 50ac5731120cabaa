"""The section `evaluate` of a recipe: the tasks that score policies, the decoding, and best-of-n selection."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from perturn.bounds import EntryOf, bounded, check_bounds
from perturn.config.parsing import parse
from perturn.config.sections import COUNT, SEVERAL, HeldOutTasks, Section
from perturn.rules import TurnControl
from perturn.table import locate
from perturn.types import Sampling

SELECT = "evaluate.select"
_SAMPLES = {"episodes": 8, "actions": 4}
"""Number of candidates of each choice, unless the recipe sets it."""


@dataclass(frozen=True)
@bounded
class Candidates:
    """The candidates of a selector: settings that `evaluate.select` has besides the selector's own."""

    among: Literal["episodes", "actions"] = "episodes"
    """Play each task several times and score one of its episodes; or sample several actions at each turn, and play one
    of them."""
    samples: Annotated[int, SEVERAL] | None = None
    """Episodes of each task, or actions at each turn; None: 8 episodes, or 4 actions."""


@dataclass(frozen=True)
class Evaluate:
    """Score every policy of the run on the same held-out tasks."""

    tasks: HeldOutTasks = field(default_factory=HeldOutTasks)
    sampling: Sampling | None = None
    """How actions are decoded; None: as in the protocol, else greedily. A score records where it departs from its
    protocol."""
    concurrency: Annotated[int, COUNT] = 16
    every: Annotated[int, COUNT] = 1
    """Score the policy after every `every` iterations, and after the last iteration."""
    samples: Annotated[int, COUNT] = 1
    """Episodes of each task; all are scored. With several, pass^k is reported: the probability that k of them
    all succeed. They need a temperature above 0, or an environment or user that is not deterministic."""
    select: Annotated[Section | None, EntryOf("selectors", Candidates)] = None
    """`name` of the selector that chooses one of several candidates, at a temperature above 0; the candidates; and its
    settings. None: each task is played once, and one action is sampled at each turn."""
    turns: TurnControl | None = None
    """Another turn limit than the protocol's, reminders of it, and extensions on demand. None: the protocol's limit."""

    distance: Literal["shortest", "searching"] | None = None
    """Measure the turns left to a success around each turn, in this sense, so that errors of the scored episodes
    are wrong turns. The world must know it. None: errors are invalid turns."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.select is not None:
            if self.samples > 1:
                raise ValueError("samples are all scored, and select scores one of several; leave one out.")
            if "name" not in self.select:
                raise ValueError("select.name is missing; `perturn list selectors` shows them.")
            shared = {key: self.select[key] for key in asdict(Candidates()) if key in self.select}
            found = parse(Candidates, shared, SELECT)
            whole = {"among": found.among, "samples": found.samples or _SAMPLES[found.among]}
            object.__setattr__(self, "select", {**self.select, **whole})

    def candidates(self, among: Literal["episodes", "actions"]) -> int:
        """Return how many episodes of each task are played, or how many actions are sampled at each turn."""
        return int(self.select["samples"]) if self.select and self.select["among"] == among else 1

    @property
    def needs(self) -> frozenset[str]:
        """The needs of the selector, as `perturn.select.SelectorTraits` names them; empty without a selector."""
        if self.select is None:
            return frozenset()
        traits: Any = locate("perturn.select.lookup:traits_of")(self.select)
        found: frozenset[str] = traits.needs
        return found
