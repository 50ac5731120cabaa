"""Row makers: their traits, their inputs, their results, and the protocol that they follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

from perturn.bounds import EntryOf
from perturn.errors import ConfigError, check_fit, check_known, check_type
from perturn.needs import Distance, Need, check_declarations
from perturn.table import check_members, check_names
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory

ROWS = EntryOf("rows", default="expert-pairs")
"""Mark of the section `rows`."""

Kind = Literal["pairs", "groups", "single", "labelled"]
"""Kinds of rows: pairs; groups that a credit weighs; single trajectories; and single trajectories with a label, given
by the sign of their weights."""

Key = tuple[str, int]
"""(task id, sample), as `Trajectory.key`."""

BRANCHES = frozenset({"branches", "wrong-branches", "expert-branches"})
"""For each explorer that provides branching episodes, the kind of these episodes; branches of a tree are not among
them."""

ANY_BRANCHES = frozenset({"some-episodes", "prover", "dependent-branches"})
"""Properties of branches that do not matter for pairs; see `perturn.config.compatibility.IMPOSED`."""


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
    """Kinds of episodes besides rollouts. The explorer must provide one of them; empty: it reads only rollouts."""
    takes: frozenset[str] = frozenset()
    """Properties of explored episodes and branches that it can deal with; see `ExplorerTraits.imposes`."""
    several_samples: bool = False
    """Whether it compares the episodes of a task, so that each task needs several."""
    corrects: int = 0
    """Corrections of a failed episode by the environment's expert, at most."""
    aggregates: bool = False
    """Whether each iteration also trains on the rows of the iterations before, as in DAgger."""
    starts_over: bool = False
    """Whether the policy before SFT is trained, on the rows of SFT and further rows; else the policy that explored."""
    names_policy: bool = False
    """Whether the policy that is trained is named after the row maker; else after the loss."""
    told: tuple[str, str] | None = None
    """Texts added to a task to say that its episode succeeds, or fails; evaluations add the first."""
    needs_history: bool = False
    """Whether the policy must see the whole conversation, for example because a row holds two episodes."""
    reads_logprobs: bool = False
    """Whether it reads the log-probabilities of sampled tokens, as the engine returned them."""
    failed: Literal["leave_out", "zero"] = "leave_out"
    """Of groups: how an episode that FAILED counts in the statistics of its group."""
    drop_equal_outcomes: bool = False
    """For groups: whether groups with equal outcomes are left out."""
    source: str | None = None
    """The user's own rows: a file, a folder or a data set of the Hub; None: rows are made from episodes."""


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
    """Whether the whole episode fits."""
    alike: Callable[[Sequence[PreferencePair]], list[bool]] = lambda pairs: [False] * len(pairs)
    """Whether both sides of each pair are the same tokens within the limit."""


@dataclass(frozen=True)
class RowInputs:
    """Inputs of a row maker. It holds the inputs that the row maker's traits and `needs` ask for."""

    explored: Sequence[Trajectory] = ()
    """Explored episodes of the iteration, by task and sample."""
    experts: Sequence[Trajectory] = ()
    """Successes of the expert."""
    taught: Sequence[Trajectory] = ()
    """Successes of the expert that SFT trains on, in its order."""
    branches: Sequence[Trajectory] = ()
    """Episodes that branch off."""
    begun: Sequence[Trajectory] = ()
    """Episodes that the branches start from, explored or the expert's; none of them FAILED."""
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
    """Measures the distance to a success around each turn, if the row maker `needs` it."""
    correct: Callable[[Sequence[tuple[Trajectory, int]]], list[Trajectory]] = _no_expert
    """Lets the expert finish episodes after a number of turns; episodes without a solution are left out."""


@dataclass(frozen=True)
class Made:
    """Result of a row maker."""

    rows: Sequence[Any]
    """Pairs, weighted trajectories, or the members of groups."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of episodes by their use, such as `kept`."""
    lacks: str = ""
    """Why the rows are not worth training on, such as `none is a failure`; empty if they are."""
    filtered: Collection[Key] = ()
    """For groups: episodes that count in the statistics of their group but are not trained on."""


class RowMaker(Protocol):
    """Makes rows of training data from the episodes of an iteration.

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
        """Declarations; a class variable if nothing depends on settings."""
        ...

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Quantities of the explored episodes that it reads, by name or as a request."""
        ...

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the rows of an iteration."""
        ...


_CLASSES = {
    "pairs": PreferencePair,
    "groups": Trajectory,
    "single": WeightedTrajectory,
    "labelled": WeightedTrajectory,
}
"""Kind of rows -> class of a row."""


def check_row_maker(maker: Any) -> None:
    """Reject a row maker that does not keep the protocol.

    Raises:
        ConfigError: If a name is misspelt, a member is missing, or it makes an unknown kind of rows.
    """
    name, protocol = f"row maker {type(maker).__name__}", "perturn.extend.RowMaker"
    check_names(type(maker), kind="row maker", known=("needs", "traits"), traits=RowTraits)
    check_declarations(maker, name, RowTraits, 'RowTraits("pairs")', protocol)
    check_members(maker, ("__call__",), "row maker", protocol)
    check_known(maker.traits.makes, get_args(Kind), f"{name} makes unknown rows {maker.traits.makes!r}")


def rows_made(maker: RowMaker, inputs: RowInputs) -> Made:
    """Return the rows of an iteration, of the kind that the traits of the row maker name.

    `lacks` is never empty if there is no row to train on.

    Raises:
        ConfigError: If the row maker returns something else.
    """
    made, name = maker(inputs), f"row maker {type(maker).__name__}"
    check_type(f"the result of {name}", made, Made, "a perturn.extend.Made")
    kind = _CLASSES[maker.traits.makes]
    strange = next((row for row in made.rows if not isinstance(row, kind)), None)
    must = f"be of class {kind.__name__}, since its traits say makes={maker.traits.makes!r}"
    check_fit(strange is None, f"rows of {name}", must, type(strange).__name__)
    return made if made.rows or made.lacks else replace(made, lacks="none became a row")


def sense_in(needs: Sequence[str | Need]) -> str | None:
    """Return the sense in which `needs` asks for the distance to a success; None if it does not."""
    found = (Distance() if need == Distance.name else need for need in needs)
    return next((need.sense for need in found if isinstance(need, Distance)), None)
