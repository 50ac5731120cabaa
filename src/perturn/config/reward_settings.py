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
    """An implicit reward model, trained in each iteration on pairs of explored episodes before a credit reads it.

    The reward model starts from the policy that the first iteration starts from, and training continues from iteration
    to iteration. A pair holds two explored episodes of a task: the best and the worst, then the second best and the
    second worst, and so on. If an iteration has no pairs, the reward model stays as it is.
    """

    loss: Annotated[Section, EntryOf("losses")] = field(default_factory=lambda: {"name": "dpo"})
    """`name` of a loss on pairs, and its settings."""
    learning_rate: Annotated[float, Bound(above=0)] = 1e-6
    """Peak learning rate of AdamW, with a fresh optimizer and schedule in each iteration."""
    threshold: Annotated[float, Bound(least=0)] = 0.0
    """Two episodes form a pair only if their total rewards differ by more than this threshold."""
    per_group: Annotated[int, COUNT] | None = None
    """Largest number of pairs of a task. None: no limit. Each episode is in at most one pair."""
    reference: Literal["previous", "start"] = "start"
    """Reference policy of the reward model, in training and for its rewards. start: the policy that the first iteration
    starts from. With start, a reward model that has seen no pair gives rewards of 0. previous: the policy that
    explored, as in OPRL."""


@dataclass(frozen=True)
class JudgeSettings:
    """A judge (LLM-as-a-judge): a model, on any engine, that rates episodes or their turns by a rubric.

    The lowest rating gives a reward of 0, the highest rating a reward of `weight`. Several ratings of an episode or
    turn are averaged. The run keeps the judge's answers, so that no question is asked twice.
    """

    model: Annotated[str, MODEL]
    """Folder, Hub id or bundled name; with `engine.name=api`, the name of the model on its server."""
    rubric: str
    """Instructions for the judge: how good and bad episodes differ. `{answer}`, or another key of the task's data in
    braces, is replaced by its value."""
    engine: Annotated[Section, EntryOf("engines")] = field(default_factory=lambda: {"name": "api"})
    """`name` of the engine that serves the judge, and its settings."""
    scale: tuple[float, float] = (1.0, 10.0)
    """Lowest and highest rating that the judge may give."""
    of: Literal["episode", "turn"] = "episode"
    """Unit of rating. episode: the judge rates a whole episode, and its last turn gets the reward. turn: the judge
    rates each action, given the turns before it."""
    samples: Annotated[int, COUNT] = 1
    """Number of ratings of each episode or turn, which are averaged. Several ratings need a temperature above 0."""
    tries: Annotated[int, COUNT] = 3
    """Largest number of tries for one rating. An episode is marked FAILED if a rated part of it has no rating after
    these tries."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=1024))
    """Decoding of the judge's answers."""
    rewards: Literal["replace", "add"] = "replace"
    """Whether the judge's rewards replace the environment's rewards or are added to them. The record keeps the
    environment's rewards in any case."""
    weight: Annotated[float, Bound(above=0)] = 1.0
    """Reward of the highest rating."""
    evaluates: bool = False
    """Whether the judge's rewards also count in evaluations. If false, only the environment's rewards count there."""

    def __post_init__(self) -> None:
        check_bounds(self)
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        """Yield messages about settings that are missing or contradict each other."""
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
    """Rewards besides the environment's rewards: from a judge, from a reward model that trains in the run, or both."""

    judge: JudgeSettings | None = None
    """A judge that rates explored episodes, and also expert episodes if `rows` compares them. None: no judge."""
    model: RewardModel | None = None
    """A reward model that trains in each iteration, for group credits that read its rewards, such as oprl. None: no
    reward model."""

    def __post_init__(self) -> None:
        if self.model is None and self.judge is None:
            raise ValueError("judge or model must be set; without both, leave reward out.")
