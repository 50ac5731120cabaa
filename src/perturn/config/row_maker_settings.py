"""Row makers: their traits, their inputs, their results, and the protocol that they follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from perturn.bounds import EntryOf
from perturn.errors import ConfigError
from perturn.needs import Distance, Need
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory

ROWS = EntryOf("rows", default="expert-pairs")
"""Mark of the section `rows`."""

Kind = Literal["pairs", "groups", "single", "labelled"]
"""Kinds of rows: pairs; groups that a credit weighs; single trajectories; and these with a label, by their weights'
sign."""

Key = tuple[str, int]
"""(task id, sample), as `Trajectory.key`."""

BRANCHES = frozenset({"branches", "wrong-branches", "expert-branches"})
"""Episodes that branch off, by what provides them; branches of a tree are not among them."""

ANY_BRANCHES = frozenset({"some-episodes", "prover", "dependent-branches"})
"""Properties of branches that pairs do not mind; see `perturn.config.compatibility.IMPOSED`."""


@dataclass(frozen=True)
class RowTraits:
    """Declarations of a row maker: stages, checks and the list of alternatives in messages follow from it."""

    makes: Kind
    """Kind of its rows; the loss must learn from this kind."""
    explored: bool = True
    """Whether it reads explored episodes."""
    expert: bool = False
    """Whether it reads the expert's episodes."""
    branches: frozenset[str] = frozenset()
    """Episodes beyond rollouts that the explorer must provide: any of these; none: they are not read."""
    takes: frozenset[str] = frozenset()
    """Properties of explored episodes and branches that it can deal with; see `ExplorerTraits.imposes`."""
    several_samples: bool = False
    """Whether it compares the samples of a task, of which there must be several."""
    corrects: int = 0
    """Corrections of a failed episode by the environment's expert, at most."""
    aggregates: bool = False
    """Whether each iteration learns from the rows of the iterations before too, as DAgger does."""
    starts_over: bool = False
    """Whether the policy before SFT is trained, on what SFT was taught and more; else the policy that explored."""
    names_policy: bool = False
    """Whether the policy that is trained is named after the row maker; else after the loss."""
    told: tuple[str, str] | None = None
    """Texts after a task that say that its episode succeeds, or fails; in evaluations the policy is told the first."""
    needs_history: bool = False
    """Whether the policy must see all of a conversation, as where a row holds two episodes."""
    reads_logprobs: bool = False
    """Whether it reads the log-probabilities of sampled tokens, as the engine returned them."""
    failed: Literal["leave_out", "zero"] = "leave_out"
    """Of groups: how an episode that FAILED counts in the statistics of its group."""
    drop_equal_outcomes: bool = False
    """Of groups: whether those whose episodes all ended alike are left out."""
    source: str | None = None
    """Rows of the user's own: a file, a folder or a data set of the Hub; None: rows are made of episodes."""


def _no_expert(wanted: Sequence[tuple[Trajectory, int]]) -> list[Trajectory]:
    raise ConfigError(
        "corrections are made by the expert of a world, which only a run has; use `perturn pair`."
    )


@dataclass(frozen=True)
class Limit:
    """The length limit of training and its effect on episodes; by default there is none."""

    too_long: Callable[[Sequence[Trajectory]], set[Key]] = lambda episodes: set()
    """Keys of the episodes whose first own turn does not fit."""
    whole: Callable[[Trajectory], bool] = lambda episode: True
    """Whether an episode fits whole."""
    alike: Callable[[Sequence[PreferencePair]], list[bool]] = lambda pairs: [False] * len(pairs)
    """Whether both sides of each pair are the same tokens within the limit."""


@dataclass(frozen=True)
class RowInputs:
    """Inputs of a row maker. It finds here what its traits and `needs` ask for."""

    explored: Sequence[Trajectory] = ()
    """Explored episodes of the iteration, by task and sample."""
    experts: Sequence[Trajectory] = ()
    """Successes of the expert."""
    taught: Sequence[Trajectory] = ()
    """Successes of the expert that SFT is taught, in its order."""
    branches: Sequence[Trajectory] = ()
    """Episodes that branch off."""
    begun: Sequence[Trajectory] = ()
    """Episodes that they branch off from: explored ones or the expert's; none FAILED."""
    earlier: Sequence[WeightedTrajectory] = ()
    """Rows of the iteration before, for a row maker that `aggregates`."""
    given: Sequence[Any] = ()
    """Rows of `RowTraits.source`."""
    quantities: Mapping[str, Mapping[Key, Any]] = field(default_factory=dict)
    """Other quantities that it `needs`, by name: the entry of each explored episode that did not FAIL, by the
    key of the episode."""
    seed: int = 0
    """Seed of the run."""
    limit: Limit = Limit()
    measure: Callable[[Sequence[Trajectory]], list[Trajectory]] = list
    """Measures the distance to a success around each turn, where it `needs` that."""
    correct: Callable[[Sequence[tuple[Trajectory, int]]], list[Trajectory]] = _no_expert
    """Lets the expert finish episodes after a number of turns; episodes without a solution are left out."""


@dataclass(frozen=True)
class Made:
    """Result of a row maker."""

    rows: Sequence[Any]
    """Pairs, weighted trajectories, or the members of groups."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of what became of the episodes, by name."""
    lacks: str = ""
    """Why the rows are not worth training on, such as `none is a failure`; empty: they are."""
    filtered: Collection[Key] = ()
    """Of groups: episodes that count in the statistics of their group and are not trained."""


class RowMaker(Protocol):
    """Turns the episodes of an iteration into rows of training data.

    A frozen dataclass of its settings, in its own module. It opens no model, no world and no file, and reads
    `RowInputs` alone.

        @dataclass(frozen=True)
        class ShortSuccesses:
            \"\"\"The policy's own successes of a few turns.\"\"\"

            traits: ClassVar[RowTraits] = RowTraits("single", names_policy=True)
            needs: ClassVar[tuple[Need, ...]] = ()
            turns: int = 10

            def __call__(self, inputs: RowInputs) -> Made:
                good = [one for one in inputs.explored if succeeded(one) and len(one.turns) <= self.turns]
                rows = [WeightedTrajectory(one, (1.0,) * len(one.turns)) for one in good]
                return Made(rows, {"kept": len(rows)}, "" if rows else "none is a short success")

    A package adds it under `[project.entry-points."perturn.rows"]`, and a recipe names it in `rows.name`.
    """

    @property
    def traits(self) -> RowTraits:
        """Declarations; a class variable where nothing depends on settings."""
        ...

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Quantities of the explored episodes that it reads, by name or as a request."""
        ...

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the rows of an iteration."""
        ...


def sense_in(needs: Sequence[str | Need]) -> str | None:
    """Return the sense in which needs ask for the distance to a success; None: they do not."""
    found = (Distance() if need == Distance.name else need for need in needs)
    return next((need.sense for need in found if isinstance(need, Distance)), None)
