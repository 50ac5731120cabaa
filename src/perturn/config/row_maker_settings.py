"""The interface of row makers: traits, inputs, results, and the Protocol class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

from perturn.bounds import EntryOf
from perturn.errors import ConfigError, check_fit, check_known, check_type
from perturn.faults import plain_scalar
from perturn.needs import Distance, Need, check_declarations
from perturn.table import at_defaults, check_members, check_names
from perturn.table_index import table
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory

ROWS = EntryOf("rows", default="expert-pairs")
"""Annotation of the recipe's field `rows`, whose `name` selects a row maker."""

Kind = Literal["pairs", "groups", "single", "labelled"]
"""Kinds of rows: preference pairs; groups, whose turns a credit weighs; single trajectories; and labelled trajectories,
where the sign of the weights is the label."""

Key = tuple[str, int]
"""(task id, sample), as `Trajectory.key`."""

BRANCHES = frozenset({"branches", "wrong-branches", "expert-branches"})
"""Kinds of branched episodes that explorers provide, except the branches of a tree."""

ANY_BRANCHES = frozenset({"some-episodes", "prover", "dependent-branches"})
"""Properties of branches that pairs always accept; see `perturn.config.compatibility.IMPOSED`."""


@dataclass(frozen=True)
class RowTraits:
    """Traits that a row maker declares. The stages of a run and the checks of a recipe follow from these traits."""

    makes: Kind
    """Kind of the rows. The loss must accept rows of this kind."""
    explored: bool = True
    """Whether the row maker reads explored episodes."""
    expert: bool = False
    """Whether the row maker reads expert episodes."""
    branches: frozenset[str] = frozenset()
    """Kinds of episodes that the row maker reads besides rollouts. The explorer must provide one of them. Empty: only
    rollouts."""
    takes: frozenset[str] = frozenset()
    """Properties of explored episodes and branches that the row maker accepts; see `ExplorerTraits.imposes`."""
    several_samples: bool = False
    """Whether the row maker compares several episodes of a task, so that each task must be played several times."""
    corrects: int = 0
    """Largest number of corrections by the environment's expert for one unsuccessful episode."""
    aggregates: bool = False
    """Whether each iteration also trains on the rows of all earlier iterations, as in DAgger."""
    starts_over: bool = False
    """Whether training starts from the policy before SFT, and trains on the rows of SFT and the new rows. If false,
    training starts from the policy that explored."""
    names_policy: bool = False
    """Whether the trained policy is named after the row maker. If false, it is named after the loss."""
    suffixes: tuple[str, str] | None = None
    """Two texts for the prompt of a task. The first is added if its episode succeeded, otherwise the second.
    Evaluations add the first text."""
    needs_history: bool = False
    """Whether each prompt must contain the whole history, for example because a row combines two episodes."""
    reads_logprobs: bool = False
    """Whether the row maker reads the log-probabilities of the sampled tokens that the engine returned."""
    failed: Literal["leave_out", "zero"] = "leave_out"
    """For groups: effect of a FAILED episode on the statistics of its group. leave_out: none. zero: it counts as a
    reward of 0."""
    drop_equal_outcomes: bool = False
    """For groups: whether to leave out groups whose episodes all have the same outcome."""
    source: str | None = None
    """Source of the user's own rows: a file, a folder or a data set of the Hub. None: rows are made from episodes."""


def _no_expert(wanted: Sequence[tuple[Trajectory, int]]) -> list[Trajectory]:
    raise ConfigError(
        "corrections are made by the expert of a world, which only a run has; use `perturn pair`."
    )


@dataclass(frozen=True)
class Limit:
    """The length limit of training and its effect on episodes. The default is no limit."""

    too_long: Callable[[Sequence[Trajectory]], set[Key]] = lambda episodes: set()
    """Function from episodes to the keys of the episodes whose first own turn does not fit. Own turns are the turns
    after the branching point, if there is one."""
    whole: Callable[[Trajectory], bool] = lambda episode: True
    """Function from an episode to whether the whole episode fits."""
    equal: Callable[[Sequence[PreferencePair]], list[bool]] = lambda pairs: [False] * len(pairs)
    """Function from pairs to booleans [pairs]: whether both sides have the same tokens within the limit, one side is
    cut to turns that both sides share, or the first turn of a side does not fit."""


@dataclass(frozen=True)
class RowInputs:
    """Inputs of a row maker. An input keeps its default if neither the traits nor `needs` ask for it."""

    explored: Sequence[Trajectory] = ()
    """Explored episodes of the iteration, sorted by task and sample."""
    experts: Sequence[Trajectory] = ()
    """Successful expert episodes."""
    sft_episodes: Sequence[Trajectory] = ()
    """Successful expert episodes that SFT trains on, in the order of SFT."""
    branches: Sequence[Trajectory] = ()
    """Branched episodes."""
    begun: Sequence[Trajectory] = ()
    """Explored or expert episodes that the branches start from. None of them is FAILED."""
    earlier: Sequence[WeightedTrajectory] = ()
    """Rows of the previous iteration, for a row maker that `aggregates`."""
    given: Sequence[Any] = ()
    """Rows read from `RowTraits.source`."""
    quantities: Mapping[str, Mapping[Key, Any]] = field(default_factory=dict)
    """Quantity -> key of an explored episode -> value, for the quantities that the row maker `needs`, except the
    distance. FAILED episodes have no values."""
    seed: int = 0
    """Seed of the run."""
    limit: Limit = Limit()
    measure: Callable[[Sequence[Trajectory]], list[Trajectory]] = list
    """Function that adds to episodes the distance to a success around each turn, if the row maker `needs` it."""
    correct: Callable[[Sequence[tuple[Trajectory, int]]], list[Trajectory]] = _no_expert
    """Function from `(episode, number of turns)` to episodes that the expert finishes after these turns. Episodes
    without a solution are left out."""


@dataclass(frozen=True)
class Made:
    """The result of a row maker."""

    rows: Sequence[Any]
    """Pairs, trajectories, weighted trajectories, or the members of groups."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of explored episodes by outcome. If `kept` is one of the names, all numbers sum to the number of explored
    episodes, except for names that begin with `cut` or `steps_`. A pair of explored episodes counts 2. If one of the
    names is `memberships`, `steps` or `nodes`, its count is the sum of the other numbers."""
    lacks: str = ""
    """Reason not to train on the rows, such as `none is a failure`; empty if there is none."""
    filtered: Collection[Key] = ()
    """For groups: keys of episodes that count in the statistics of their group but are not trained on."""
    remedy: str = "explore more tasks, or take a higher temperature"
    """Clause that says what to do about `lacks`."""


class RowMaker(Protocol):
    """A row maker turns the episodes of an iteration into rows of training data.

    A row maker is a frozen dataclass of its settings, in its own module. It reads `RowInputs` alone and opens no model,
    environment or file.

        @dataclass(frozen=True)
        class ShortSuccesses:
            \"\"\"The policy's own successes of a few turns.\"\"\"

            traits: ClassVar[RowTraits] = RowTraits("single", names_policy=True)
            needs: ClassVar[tuple[Need, ...]] = ()
            turns: int = 10

            def __call__(self, inputs: RowInputs) -> Made:
                good = [one for one in inputs.explored if succeeded(one) and len(one.turns) <= self.turns]
                rows = [WeightedTrajectory(one, (1.0,) * len(one.turns)) for one in good]
                counts = {"kept": len(rows), "others": len(inputs.explored) - len(rows)}
                return Made(rows, counts, "" if rows else "none is a short success")

    A recipe chooses a row maker in `rows.name`, by its name or as `file.py:Class`. A package registers its row makers
    under `[project.entry-points."perturn.rows"]`.
    """

    @property
    def traits(self) -> RowTraits:
        """Traits of the row maker; a class variable unless they depend on settings."""
        ...

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Quantities of the explored episodes that the row maker reads, by name or as a `Need`."""
        ...

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the training rows of an iteration."""
        ...


FATES = ("failed", "no_turns", "too_long", "repeated", "success", "failure")
"""Categories of an explored trajectory for row makers that train on single trajectories. A trajectory gets the first
category that fits. `too_long`: the first turn exceeds the length limit. `repeated`: an earlier trajectory of the task
has the same observations and actions, or an expert's trajectory in the rows has the same actions."""
UNITS = ("memberships", "steps", "nodes")
"""Names of counts that are the sum of the other counts, in place of the number of explored episodes."""
BESIDE = ("cut", "steps_")
"""Prefixes of counts that are no counts of episodes by outcome: cut episodes, and the expert's steps."""

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


def row_makers() -> dict[str, RowMaker]:
    """Return the row makers with default settings, by name, as alternatives that an error can name.

    Row makers with a setting without default are left out, and row makers that `check_row_maker` rejects: their error
    is raised when a recipe names them.
    """
    made = {name: at_defaults(entry) for name, entry in table("rows").items()}
    return {name: one for name, one in made.items() if one is not None and _is_sound(one)}


def _is_sound(maker: RowMaker) -> bool:
    try:
        check_row_maker(maker)
    except ConfigError:
        return False
    return True


def rows_made(maker: RowMaker, inputs: RowInputs) -> Made:
    """Return the rows of an iteration, of the kind that the traits of the row maker name.

    `lacks` is never empty if there is no row to train on.

    Raises:
        ConfigError: If the row maker returns something else.
    """
    made, name = maker(inputs), f"row maker {type(maker).__name__}"
    check_type(f"the result of {name}", made, Made, "a perturn.extend.Made")
    check_type(f"the rows of {name}", made.rows, list | tuple, "a list")
    check_type(f"the counts of {name}", made.counts, Mapping, "a mapping")
    kind = _CLASSES[maker.traits.makes]
    strange = next((row for row in made.rows if not isinstance(row, kind)), None)
    must = f"be of class {kind.__name__}, since its traits say makes={maker.traits.makes!r}"
    check_fit(strange is None, f"rows of {name}", must, type(strange).__name__)
    made = replace(made, counts=_whole_counts(made.counts, f"counts of {name}"))
    if made.lacks and any(count for what, count in made.counts.items() if what.endswith("too_long")):
        made = replace(made, remedy=f"increase model.max_length, {made.remedy}")
    return made if made.rows or made.lacks else replace(made, lacks="none became a row")


def _whole_counts(given: Mapping[str, Any], what: str) -> dict[str, int]:
    """Return the counts of a row maker as whole numbers of Python."""
    counts = {str(name): plain_scalar(count) for name, count in given.items()}
    for name, count in counts.items():
        whole = isinstance(count, int | float) and float(count).is_integer()
        check_fit(whole, f"{name} in the {what}", "be a whole number", given[name])
    return {name: int(count) for name, count in counts.items()}


def sense_in(needs: Sequence[str | Need]) -> str | None:
    """Return the measure of the distance to a success that `needs` asks for; None if it asks for no distance."""
    found = (Distance() if need == Distance.name else need for need in needs)
    return next((need.sense for need in found if isinstance(need, Distance)), None)
