"""An explorer, a row maker and a selector."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from perturn.extend import (
    COUNT,
    Explorer,
    Made,
    RowTraits,
    SelectorTraits,
    bounded,
    make_jobs,
)


@dataclass(frozen=True)
@bounded
class WarmUp(Explorer):
    """Play more episodes of each task in the first iteration."""

    times: Annotated[int, COUNT] = 2
    """Factor on `samples` in the first iteration."""

    def jobs(self, inputs, number):
        """Return the rollouts."""
        samples = self.samples * (self.times if inputs.iteration == 1 else 1)
        return make_jobs(inputs.tasks, inputs.seed, samples, inputs.iteration)


@dataclass(frozen=True)
@bounded
class NearGroups:
    """Make groups of the episodes of tasks whose door is near."""

    traits: ClassVar[RowTraits] = RowTraits("groups", several_samples=True)
    needs: ClassVar = ("guest-doors",)

    most: Annotated[int, COUNT] = 1
    """Steps to the door, at most."""

    def __call__(self, inputs):
        """Return the members of the groups."""
        near = inputs.quantities["guest-doors"]
        return Made([one for one in inputs.explored if near.get(one.key, self.most + 1) <= self.most])


@dataclass(frozen=True)
class Shortest:
    """Take the episode with the fewest letters."""

    traits: ClassVar[SelectorTraits] = SelectorTraits(among=("episodes",))

    def among_episodes(self, inputs):
        """Return the function that scores episodes."""
        return lambda episodes: [-sum(len(turn.action.text) for turn in one.turns) for one in episodes]
