"""The section `reward` of a recipe: rewards besides the environment's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from perturn.bounds import MODEL, Bound, EntryOf, check_bounds
from perturn.config.sections import COUNT, Section, Train, refuse
from perturn.rules import Sampling


@dataclass(frozen=True)
class RewardModel(Train):
    """An implicit reward model. In each iteration it learns from pairs of the iteration before the credit reads it.

    It starts from the policy that the first iteration starts from, and continues from iteration to iteration. A pair
    holds two explored episodes of a task: the best and the worst, then the second best and the second worst, and so on.
    An iteration without pairs does not change it.
    """

    loss: Annotated[Section, EntryOf("losses")] = field(default_factory=lambda: {"name": "dpo"})
    """`name` of a loss on pairs and its settings."""
    learning_rate: Annotated[float, Bound(above=0)] = 1e-6
    """Peak learning rate of AdamW, with a fresh optimizer and schedule in each iteration."""
    threshold: Annotated[float, Bound(least=0)] = 0.0
    """Score gap that a pair must exceed."""
    per_group: Annotated[int, COUNT] | None = None
    """Pairs of a task, at most; None: as many as there are, each episode in one."""
    reference: Literal["previous", "start"] = "start"
    """Reference of the model, in training and for its rewards: the policy that the first iteration started from
    (start), or the policy that explored (previous), as in OPRL. With start, a model that was trained on no pair yet
    gives rewards of 0."""


@dataclass(frozen=True)
class JudgeSettings:
    """A judge: a model that rates episodes or their turns by a rubric, on any engine.

    The lowest rating gives a reward of 0, the highest a reward of `weight`. Several ratings of an episode or turn are
    averaged. Answers are kept in the run, so that no question is asked twice.
    """

    model: Annotated[str, MODEL]
    """Folder, Hub id or bundled name; with `engine.name=api` the model's name at its server."""
    rubric: str
    """The rubric: what the judge should rate as good and bad. `{answer}`, or another key of a task's data, is replaced
    by its text."""
    engine: Annotated[Section, EntryOf("engines")] = field(default_factory=lambda: {"name": "api"})
    """`name` of the engine that serves the judge, and its settings."""
    scale: tuple[float, float] = (1.0, 10.0)
    """Lowest and highest rating."""
    of: Literal["episode", "turn"] = "episode"
    """Part that is rated: a whole episode, whose reward goes to its last turn, or each action, given the turns before
    it."""
    samples: Annotated[int, COUNT] = 1
    """Ratings of each episode or turn. Several need a temperature above 0."""
    tries: Annotated[int, COUNT] = 3
    """Tries to get one rating, at most. An episode is marked FAILED if a part of it has no rating after these tries."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=1024))
    """How judgments are decoded."""
    rewards: Literal["replace", "add"] = "replace"
    """Whether the judge's rewards replace the environment's or are added to them. The environment's rewards stay in the
    record."""
    weight: Annotated[float, Bound(above=0)] = 1.0
    """Reward of the highest rating."""
    evaluates: bool = False
    """Whether evaluations are scored with these rewards too; else with the environment's alone."""

    def __post_init__(self) -> None:
        check_bounds(self)
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        """Yield faults of settings that depend on each other."""
        if not self.rubric.strip():
            yield "rubric must say what is rated, got an empty text."
        if "name" not in self.engine:
            yield "engine.name is missing; `perturn list engines` shows them."
        low, high = self.scale
        if low >= high:
            yield f"scale must be [lowest, highest], got [{low:g}, {high:g}]."
        if self.samples > 1 and self.sampling.temperature == 0:
            yield (
                "samples > 1 at temperature 0 are one judgment; set sampling.temperature, such as 1.0, or samples to 1."
            )


@dataclass(frozen=True)
class Reward:
    """Rewards besides the environment's: of a judge, of a model that learns in the run, or both."""

    judge: JudgeSettings | None = None
    """Rates explored episodes, and the expert's episodes if rows compare them. None: there is no judge."""
    model: RewardModel | None = None
    """Learns in each iteration, for credits of groups that read its rewards, such as oprl. None: no model learns."""

    def __post_init__(self) -> None:
        if self.model is None and self.judge is None:
            raise ValueError("judge or model must be set; without both, leave reward out.")
