"""A quantity that the environment is asked for."""

from typing import ClassVar

from perturn.extend.quantity_tools import Computed, Quantity, QuantityTraits, ability, lacks


class SeenDoors(Quantity):
    """Steps to the door of the task of each episode."""

    traits: ClassVar[QuantityTraits] = QuantityTraits("a question for each episode", reads_world=True)

    def check(self, request, planned):
        """Reject an environment without doors."""
        if planned.env is not None and (problem := lacks(planned.env, "doors")):
            from perturn.extend import ConfigError

            raise ConfigError(f"{planned.reader}: {problem}.")

    def compute(self, request, episodes, source):
        """Ask the environment, which may be in another process."""
        with source.world() as world:
            return Computed([ability(world, "doors")(one.task) for one in episodes])

    def exact(self, request, ground):
        """Return 1 for each episode: small processes have one door."""
        return [1 for _ in ground.episodes.steps]
