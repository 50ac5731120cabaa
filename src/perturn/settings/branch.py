"""The section `branch` of a recipe: from which turns explored episodes are played on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from perturn.bounds import Bound, bounded, check_bounds
from perturn.settings.making import RowTraits
from perturn.settings.sections import COUNT, SEVERAL, require


@dataclass(frozen=True)
@bounded
class Search:
    """Search the tree of an explored episode (MCTS): each next episode is played on from where the last ones say."""

    simulations: Annotated[int, COUNT] = 8
    """Episodes of a tree, one after another, beside the explored one; the trees of all tasks grow at the same time."""
    width: Annotated[int, SEVERAL] = 3
    """Actions to draw from a state, before the best of them so far is followed to the next one."""
    exploration: Annotated[float, Bound(least=0)] = 1.0
    """Weight of what was tried little beside the mean score, in units of reward (UCT's constant)."""


@dataclass(frozen=True)
class Branch:
    """Play explored episodes on from some of their turns, to see what these turns were worth."""

    every: Annotated[int, COUNT] = 5
    """Turns from one that is played on from to the next; the first of an episode is its first turn plus this many."""
    samples: Annotated[int, COUNT] = 2
    """Episodes from each; their first turns are those of the explored one."""
    of: Literal["all", "failures", "expert"] = "all"
    """Episodes that are played on: all explored ones, those that did not solve their task, or the expert's of the tasks
    that are explored."""
    policy: Literal["base", "sft"] | None = None
    """Who plays them on: base, the model that the run begins with, or sft, the policy after SFT. None: the policy that
    explored."""
    window: Annotated[int, COUNT] | None = None
    """Turns that a branch plays, at most; one that is not over then is left so, for whoever reads these turns alone,
    such as credit `slate`, or pairs of one turn by progress. None: each is played to its end."""
    search: Search | None = None
    """Choose the turns by tree search, and play on from branches too. None: as `at` says."""
    at: Literal["every", "wrong", "entropy", "mixed"] = "every"
    """Turns that are played on from: every so many; the first wrong one of an episode; by
    a chance that grows with the entropy of the policy that explored, where its action begins (ARPO); or where it may as
    well succeed as fail, as a predictor on its hidden states has it (TRACE)."""
    forks: Annotated[int, COUNT] = 1
    """Turns of an episode that are played on from: with entropy the first so many at most, with mixed so many in the
    mean over the episodes of an iteration."""
    chance: Annotated[float, Bound(least=0, most=1)] = 0.5
    """With entropy: chance of a turn whose entropy is that of the first turn."""
    gain: Annotated[float, Bound(least=0)] = 0.2
    """With entropy: what is added to the chance for an entropy that is higher by all that there is, log(vocabulary)."""
    others: Literal["tasks", "episodes"] = "tasks"
    """With mixed: whose outcomes tell of an episode: those of other tasks alone, or of other samples of its task too,
    which tell more, but bend a credit that trains on branches."""

    def __post_init__(self) -> None:
        check_bounds(self)
        unread = {
            "every": self.at != "every",
            "forks": not self.reads_policy,
            "chance": self.at != "entropy",
            "gain": self.at != "entropy",
            "others": self.at != "mixed",
        }
        for name, goes_unread in unread.items():
            require(
                not goes_unread or getattr(self, name) == getattr(Branch, name),
                f"{name} is not read with branch.at={self.at}; leave it out.",
            )
        require(
            self.search is None or self.window is None,
            "search reads how episodes end, and with branch.window they do not; leave one out.",
        )
        if self.at == "every":
            return
        require(
            self.search is None,
            f"search chooses the turns, so branch.at={self.at} goes unread; leave one out.",
        )
        require(
            self.of != "expert",
            f"of must not be expert with branch.at={self.at}, which chooses among turns of the policy that explored.",
        )
        require(
            self.at != "mixed" or self.policy is None,
            "policy must be left out with branch.at=mixed, which predicts how the policy that explored goes on.",
        )

    @property
    def reads_policy(self) -> bool:
        """Whether the policy that explored is read to choose the turns."""
        return self.at in ("entropy", "mixed")


DEFAULTS = {
    "branches": Branch(),
    "expert-branches": Branch(every=1, samples=5, of="expert"),
    "regular-branches": Branch(),
    "tree": Branch(search=Search()),
    "turn-branches": Branch(every=1),
}
"""What row makers need -> how it is played where the recipe does not say; for the expert's as IPR has it."""


def provided(branch: Branch | None) -> frozenset[str]:
    """Return what is played beyond rollouts, by name."""
    if branch is None:
        return frozenset()
    if branch.search is not None:
        return frozenset({"tree"})
    if branch.of == "expert":
        return frozenset({"expert-branches"})
    if branch.at == "wrong":
        return frozenset({"wrong-branches"})
    regular = {"regular-branches"} if branch.at == "every" else set()
    each = {"turn-branches"} if branch.at == "every" and branch.every == 1 else set()
    return frozenset({"branches"} | regular | each)


def imposed(branch: Branch | None) -> frozenset[str]:
    """Return properties of branches that their readers must take."""
    found = branch and {
        "some-episodes": branch.of == "failures",
        "prover": branch.policy is not None,
        "cut-branches": branch.window is not None,
    }
    return frozenset(name for name, holds in (found or {}).items() if holds)


def check_branch(branch: Branch, rows: RowTraits | None, *, has_sft: bool) -> None:
    """Refuse branches that nothing reads, and rows that need others.

    Args:
        branch: The section.
        rows: Traits of the row maker; None: none.
        has_sft: Whether the recipe has a section sft.

    Raises:
        ValueError: Saying what to set.
    """
    found = provided(branch)
    require(rows is not None, "branch is read by credits of groups and by some rows alone; leave it out.")
    assert rows is not None
    wanted = rows.branches or (frozenset({"branches"}) if rows.makes == "groups" else frozenset())
    require(
        not wanted.isdisjoint(found),
        f"the rows need {' or '.join(sorted(wanted)) or 'no branches'}, and the section branch plays "
        f"{', '.join(sorted(found))}; change the one or the other.",
    )
    missing = sorted(imposed(branch) - rows.takes)
    require(
        not missing,
        f"the rows do not take {', '.join(missing)}, as the section branch has them; leave that out.",
    )
    require(
        branch.policy != "sft" or has_sft,
        "branch.policy is sft, and the recipe has no section sft; add one, or take branch.policy=base.",
    )
