"""Environment that counts words, and episodes of a policy that says numbers."""

from perturn.episodes.episode import episode
from perturn.episodes.replay import play_script
from perturn.errors import EngineFailure
from perturn.types import Action, EpisodeProtocol, Observation, Task

PLAIN = EpisodeProtocol("plain", format="plain", max_turns=6)


class Count:
    """Each word is answered by how many were said, and pays a tenth of that; so many end it."""

    name = "count-1"

    def __init__(self, end=99, says="heard"):
        self.end, self.says = end, says

    def tasks(self, split):
        """Return one task."""
        return [Task("t")]

    def reset(self, task, seed):
        """Start counting."""
        self.said = 0
        return Observation(f"begin {seed}")

    def step(self, action):
        """Return the next number."""
        self.said += 1
        over = self.said == self.end
        return Observation(f"{self.says} {self.said}", self.said / 10, terminated=over, success=over)

    def close(self):
        """Do nothing."""


def played(job, world=None, words=6):
    """Return the episode of a job, whose policy says the number of each turn."""
    at = len(job.begun.turns) if job.begun else 0
    script = [Action(f"word {at + turn}") for turn in range(words)]
    return play_script(episode(world or Count(), job, protocol=PLAIN), script, EngineFailure("no more"))
