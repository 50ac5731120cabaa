"""Section `outcomes`: the alignment learns from single episodes by how they ended, without pairs. Its ways, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from perturn.bounds import check_bounds
from perturn.settings.sections import COUNT, require


@dataclass(frozen=True)
class Way:
    """One way to learn from episodes by how they ended."""

    says: str
    """A line on it."""
    anew: bool = True
    """Whether it trains the policy that SFT began with, on what SFT was taught and more; else the one that explored."""
    told: bool = False
    """Whether an episode's prompt says how it ends, and the policy is then asked for success."""
    labelled: bool = False
    """Whether the sign of a row's weights says which of both it is, as the loss kto reads it."""
    of_failures: bool = True
    """Whether it learns from failures too."""
    corrected: bool = False
    """Whether the environment's expert takes over in own failures, and his turns are what is learned of them. With
    several iterations each learns from the corrections of all before it too, as DAgger does."""


OUTCOMES: Mapping[str, Way] = {
    "rft": Way(
        "The expert's episodes and the policy's own successes, taught to the policy that SFT began with.",
        of_failures=False,
    ),
    "kto": Way(
        "The expert's episodes and own successes as desirable, own failures as undesirable, for the loss kto.",
        anew=False,
        labelled=True,
    ),
    "nat": Way(
        "The expert's and own episodes, each told in its prompt whether it succeeds, taught to the policy before SFT.",
        told=True,
    ),
    "coh": Way(
        "As nat, but a failure stands before a success of its task, in one conversation.",
        told=True,
    ),
    "oec": Way(
        "The expert's episodes, and his turns where he takes over in own failures, taught to the policy before SFT.",
        corrected=True,
    ),
}
"""Way by name."""


@dataclass(frozen=True)
class Outcomes:
    """Learn from single episodes by how they ended: the expert's, and those that the policy has explored."""

    name: Literal["rft", "kto", "nat", "coh", "oec"] = "rft"
    """The way: rft, kto, nat, coh or oec."""
    takeovers: Annotated[int, COUNT] = 2
    """Turns of each failure, after its first, at which the expert takes over; each makes an episode of oec."""
    takeover: Literal["random", "confidence"] = "random"
    """Which turns these are: drawn at random, or those whose action the policy was least sure of as it sampled it, by
    the mean log-probability of its tokens."""
    success: str = "What follows solves the task."
    """Text after the one that poses the task of a success, and of each task when the policy is evaluated; of nat
    and coh."""
    failure: str = "What follows does not solve the task."
    """Text after the one that poses the task of a failure; of nat and coh."""

    def __post_init__(self) -> None:
        check_bounds(self)
        texts = self.success, self.failure
        for key in ("takeovers", "takeover"):
            require(
                self.way.corrected or getattr(self, key) == getattr(type(self), key),
                f"no expert takes over in outcomes {self.name}, so {key} goes unread; leave it out.",
            )
        require(all(texts) and texts[0] != texts[1], f"success and failure must be two texts, got {texts}.")
        require(
            self.way.told or texts == (type(self).success, type(self).failure),
            f"outcomes {self.name} tells nothing in its prompts, so success and failure go unread; leave them out.",
        )

    @property
    def suffixes(self) -> tuple[str, str]:
        """Both texts as they stand after the text of a task."""
        return f"\n{self.success}", f"\n{self.failure}"

    @property
    def way(self) -> Way:
        """Properties of the way."""
        return OUTCOMES[self.name]
