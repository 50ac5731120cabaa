"""A stand-in for vLLM's replicas that are sent weights, and a model to send."""

from torch import nn

from perturn.errors import RunError


class Backend:
    """vLLM's replicas: what they are told, and what one of them fails at."""

    def __init__(self, workers, fails=None):
        self.counts, self.fails, self.told = workers, fails, []

    async def workers(self):
        """Of each server."""
        return self.counts

    async def transfer(self, step, bodies):
        """Note a step."""
        self.told.append((step, bodies))
        if step == self.fails:
            raise RunError("a worker is out of memory")

    def steps(self):
        """What was told, without the bodies."""
        return [step for step, _ in self.told]


def tied():
    """A model of 30 numbers whose last layer is its first."""
    model = nn.ModuleDict({"embed": nn.Embedding(6, 5), "head": nn.Linear(5, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    return model
